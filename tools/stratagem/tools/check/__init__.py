"""Checks of a job before it is submitted, for `stratagem check`."""

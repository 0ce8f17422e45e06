"""Examines a process's surroundings and reports what is wrong with them, for `stratagem doctor`."""

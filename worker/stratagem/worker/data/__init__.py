"""Rows of the user's data: where they come from, in which order, and who gets which."""

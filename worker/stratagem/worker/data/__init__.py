"""Rows of the user's data: their sources, their order, and their division among clients."""

"""Decisions of a site by its own file: which jobs it takes part in, and which data leave it."""

"""Placement of runs on workers, and the division of their steps into segments."""

"""Folds in which an update counts otherwise than by its rows."""

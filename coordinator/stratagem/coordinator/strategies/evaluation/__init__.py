"""Evaluations, whoever makes them: their sums, and the metrics that a commit has of them."""

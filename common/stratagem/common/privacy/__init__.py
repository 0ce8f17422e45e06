"""Differential privacy: what rounds of noised sums cost, and the noise itself, drawn from a key.

Pure functions of numbers and keys, shared by the coordinator, which adds the noise for clients,
and the worker, which adds it for rows. Nothing here knows of runs.
"""

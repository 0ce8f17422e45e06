"""Differential privacy: what rounds of noised sums cost, the noise, drawn from a key, and the
secret that keys come from.

Shared by the coordinator, which adds the noise for clients,
and the worker, which adds it for rows. Nothing here knows of runs.
"""

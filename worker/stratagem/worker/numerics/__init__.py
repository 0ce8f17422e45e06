"""Numerics of a job's model: compilation, precision, checkpointing, and random numbers."""

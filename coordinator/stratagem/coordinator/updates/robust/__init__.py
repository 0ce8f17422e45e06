"""Robust aggregation: what takes the place of the weighted mean when some updates may be false."""

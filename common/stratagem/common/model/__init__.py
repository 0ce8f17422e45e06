"""A model as data: its graph, its flat program of calls, and the partition of that into stages."""

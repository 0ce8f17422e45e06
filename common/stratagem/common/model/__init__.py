"""A model is described as data: its graph, its flat program of calls, and the partition of that
program into stages.
"""

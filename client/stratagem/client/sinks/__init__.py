"""Sinks write the history of a run outside the coordinator: to files, TensorBoard and trackers.
They run in the client, each in a thread of its own, so a sink that fails changes no run.
"""

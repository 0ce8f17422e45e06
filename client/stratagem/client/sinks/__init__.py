"""Sinks export the history of a run: to files, TensorBoard and experiment trackers.

They run in the client, each in a thread of its own, so a sink that fails changes no run.
"""

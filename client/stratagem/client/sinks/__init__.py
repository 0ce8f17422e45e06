"""Where the history of a run goes beside the coordinator: files, TensorBoard and trackers.

Sinks run in the client, each in a thread of its own: one that fails changes no run.
"""

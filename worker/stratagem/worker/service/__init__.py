"""WorkerService: calls of the coordinator are checked, fenced and passed to sessions.

Term: the number of a coordinator process; it rises with each one that takes over.
Fence: term and membership in a call, by which calls that are too old are refused.
"""

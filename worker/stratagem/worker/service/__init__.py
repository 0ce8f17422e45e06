"""WorkerService: the coordinator's calls, which are checked, fenced and passed to sessions."""

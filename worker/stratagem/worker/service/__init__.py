"""WorkerService: what the coordinator calls, checked, fenced and handed to sessions."""

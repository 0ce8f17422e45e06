"""Who leads and by which clock: the gate before calls, the leases of the workers."""

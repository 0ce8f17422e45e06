"""The runtime around the core: command loop, tasks of effects, leases, and links to workers."""

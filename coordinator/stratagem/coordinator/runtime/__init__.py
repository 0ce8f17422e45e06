"""The runtime surrounds the core: the command loop, effect supervision, leases and links."""

"""The runtime around the core: the command loop, effect supervision, leases, links, rendezvous."""

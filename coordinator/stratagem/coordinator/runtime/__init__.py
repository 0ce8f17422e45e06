"""What runs the core: the command loop, effects under supervision, leases, links, rendezvous."""

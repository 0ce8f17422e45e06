"""Models that train apart from each other: nodes that gossip, replicas that take local steps."""

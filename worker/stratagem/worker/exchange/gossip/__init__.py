"""Gossip averaging: every node averages its parameters with its neighbours'."""

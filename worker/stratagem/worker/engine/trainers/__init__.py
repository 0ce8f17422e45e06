"""Trainers: synchronous, gossip, federated client, inference; and their saved states."""

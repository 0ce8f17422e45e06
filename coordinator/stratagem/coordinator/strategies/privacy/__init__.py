"""The privacy budget of a federated run: what is spent, and the round that would be too much."""

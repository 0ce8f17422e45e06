"""Federated averaging trains a model in rounds of clients."""

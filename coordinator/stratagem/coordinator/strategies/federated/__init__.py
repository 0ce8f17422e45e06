"""Federated averaging: rounds of clients."""

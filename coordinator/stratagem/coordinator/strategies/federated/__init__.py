"""Federated averaging: rounds of clients, or of silos that train together."""

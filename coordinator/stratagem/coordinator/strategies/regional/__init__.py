"""Federations of federations: rounds of regions, each of which has rounds of clients."""

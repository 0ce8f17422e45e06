"""Federations whose clients are parties: silos that train together, or regions of clients."""

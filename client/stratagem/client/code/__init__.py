"""Prepare the code that travels with jobs in the client: a folder as a bundle, cells as modules."""

"""Secure aggregation: arithmetic and cryptography that clients and the coordinator share."""

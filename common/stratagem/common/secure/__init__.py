"""This package holds the arithmetic and cryptography of secure aggregation that clients and the
coordinator share.
"""

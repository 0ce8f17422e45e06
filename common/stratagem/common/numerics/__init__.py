"""This package defines the arithmetic that all parts must agree on to the bit: shards, tree sums,
random numbers.
"""

"""This package defines the arithmetic that all parts must agree on to the bit: shards, tree sums,
random numbers.

- shard: one of a fixed number of parts of a batch, however many workers there are
- tree: the fixed order in which the shards' gradients are added, whoever adds them
- numerics rules: the numbered rules of this arithmetic; a run keeps those that it began with
"""

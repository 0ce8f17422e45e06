"""The arithmetic that all parts must agree on to the bit: shards, tree sums, random numbers."""

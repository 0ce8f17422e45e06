"""All-reduce of partial sums: direct, by a tree, and in shared memory."""

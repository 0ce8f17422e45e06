"""Storage of gradients in buckets, and who holds which partial sums."""

"""Storage of gradients in buckets, and the plan of partial sums that each member computes."""

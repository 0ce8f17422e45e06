"""Effects of secure aggregation: keys, shares, and the opening of a sum."""

"""How a run looks in a terminal while it runs: what is said, and the line that redraws itself."""

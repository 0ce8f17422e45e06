"""One pass and one update: forward, backward, buffers, and what a step reports."""

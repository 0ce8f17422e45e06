"""Format a run for the output on a terminal, and complete command lines in a shell."""

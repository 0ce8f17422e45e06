"""Format the output of a terminal for a run, and complete command lines in a shell."""

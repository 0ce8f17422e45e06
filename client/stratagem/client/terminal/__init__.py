"""What a terminal shows of a run while it runs, and what a shell is told to complete a line."""

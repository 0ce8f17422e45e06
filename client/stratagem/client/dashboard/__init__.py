"""The page on which runs can be watched: a process of its own, and an ordinary client of the
coordinator."""

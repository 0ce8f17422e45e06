"""What the facts of a run say about its course: pure functions over its events, in order."""

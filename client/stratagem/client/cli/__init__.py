"""The command line `stratagem`, on top of the blocking client."""

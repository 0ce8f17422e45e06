"""This package implements the command line `stratagem` on top of the blocking client."""

"""What a process finds around itself and what is wrong with that; for `stratagem doctor`."""

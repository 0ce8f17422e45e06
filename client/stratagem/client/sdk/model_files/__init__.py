"""Models as files for other programs: what is where in them."""

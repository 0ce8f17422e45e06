"""What a site decides by its own file: which jobs it takes part in, and what leaves it."""

"""Models: built from the user's factory or from a graph document."""

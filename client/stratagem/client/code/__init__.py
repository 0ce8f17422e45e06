"""Code that travels with jobs, as the client makes it: a folder as a bundle, cells as modules."""

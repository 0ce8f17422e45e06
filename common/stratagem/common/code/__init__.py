"""Code bundles hold a folder of the user's modules as one file with one name, and can be signed."""

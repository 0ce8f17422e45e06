"""Code bundles: a folder of the user's modules as one file with one name, and signatures of it."""

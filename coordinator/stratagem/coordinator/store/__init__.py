"""The stores of the coordinator: states as blobs, named by digest, and facts in a journal."""

"""The order in which an epoch passes the training rows, and the batches that it is cut into."""

"""The client's side of federated rounds: training, privacy of rows, and secure aggregation."""

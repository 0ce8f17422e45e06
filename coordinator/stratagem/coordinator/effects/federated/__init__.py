"""Effects of federated rounds: clients' training, updates, aggregation."""

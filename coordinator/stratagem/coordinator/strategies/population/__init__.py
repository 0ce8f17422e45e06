"""Population-based training has members that copy better ones (donors) and vary hyperparameters."""

"""Population-based training has members that copy each other and vary hyperparameters."""

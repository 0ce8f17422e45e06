"""Population-based training: members that copy and vary hyperparameters."""

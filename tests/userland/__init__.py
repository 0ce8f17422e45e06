"""What users would write: the models, data, losses and metrics that the jobs of the tests name."""

"""What Execute does: a plan becomes training, evaluation or a stage of a pipeline."""

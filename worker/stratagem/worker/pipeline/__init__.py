"""Pipeline parallelism (ModelParallel): stages, messages between them, and the training step."""

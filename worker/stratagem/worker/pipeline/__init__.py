"""Pipeline parallelism (ModelParallel) on a worker: stages, messages between them, and the training
step."""

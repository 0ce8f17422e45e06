"""ModelParallel on a worker: stages, what travels between them, and the step that they make."""

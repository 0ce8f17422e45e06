"""ModelParallel on a worker: stages, the messages between them, and the step that they make."""

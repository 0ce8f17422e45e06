"""Sets up a process: signals, file descriptors, malloc, settings, failpoints."""

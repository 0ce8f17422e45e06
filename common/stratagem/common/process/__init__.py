"""How a process is set up: signals, file descriptors, malloc, settings, failpoints."""

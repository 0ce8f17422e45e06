"""This package sets up a process: signals, file descriptors, allocator, settings, failpoints."""

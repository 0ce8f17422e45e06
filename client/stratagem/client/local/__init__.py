"""A whole cluster on this machine: child processes, their supervisor, the process template."""

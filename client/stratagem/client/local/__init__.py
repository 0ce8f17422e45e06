"""Run a whole cluster as supervised child processes on this machine."""

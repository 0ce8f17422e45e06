"""What people and programs see of runs: events, logs, profiles, metrics."""

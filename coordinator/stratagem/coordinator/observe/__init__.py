"""What people and programs see of runs: events, logs, profiles, what a run waits for."""

"""The step history of runs, as a client has it."""

"""The optimizer of a job: its section, its groups of parameters, its schedule and its keywords."""

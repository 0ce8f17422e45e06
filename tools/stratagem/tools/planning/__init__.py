"""What a job will need, found out before it runs: memory, and settings that fit."""

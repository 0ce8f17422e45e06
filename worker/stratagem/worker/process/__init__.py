"""The worker process: how it starts, makes itself known, is measured, and ends."""

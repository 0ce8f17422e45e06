"""The process that answers a question about a job: memory, settings, faults."""

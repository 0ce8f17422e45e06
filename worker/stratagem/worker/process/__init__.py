"""The worker process: settings, start, registration and heartbeats, metrics, and shutdown."""

"""The coordinator process: how it starts, what it tells Prometheus, how it ends."""

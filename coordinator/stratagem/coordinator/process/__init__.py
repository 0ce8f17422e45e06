"""The coordinator process: its start, its Prometheus metrics, its end."""

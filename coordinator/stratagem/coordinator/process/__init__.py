"""This package starts and ends the coordinator process, and defines its Prometheus metrics."""

"""Reports on every process: metrics, logs, traces."""

"""What every process tells about itself: metrics, logs, traces."""

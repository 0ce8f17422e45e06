"""What every process of ours tells Prometheus, and how: definitions, plain values, an endpoint."""

"""Model and pipeline parallelism as data: stages, tags, schedules. Knows no torch and no gRPC."""

"""The gRPC service of the coordinator: decode, one call, encode."""

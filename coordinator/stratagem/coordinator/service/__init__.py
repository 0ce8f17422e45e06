"""The gRPC face of the coordinator: decode, one call, encode."""

"""The gRPC service of the coordinator: decodes requests, makes one call, encodes the answer."""

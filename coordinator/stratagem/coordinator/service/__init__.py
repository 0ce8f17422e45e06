"""The gRPC service of the coordinator decodes a request, makes one call, and encodes the answer."""

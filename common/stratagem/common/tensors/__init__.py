"""This package defines the tensor stream: element types, manifests, chunks, and canonical files."""

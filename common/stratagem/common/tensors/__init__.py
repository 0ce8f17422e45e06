"""The tensor stream: element types, manifests, chunks, canonical files and their transfer."""

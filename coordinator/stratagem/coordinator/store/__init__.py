"""The coordinator stores states as blobs, and facts in a journal."""

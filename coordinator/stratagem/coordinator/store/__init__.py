"""The coordinator's storage: states as blobs, facts in a journal."""

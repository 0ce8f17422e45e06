"""What the coordinator keeps: states as blobs, facts in a journal."""

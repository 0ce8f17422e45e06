"""Resources of one worker process that all its sessions share: torch thread, blobs, clock."""

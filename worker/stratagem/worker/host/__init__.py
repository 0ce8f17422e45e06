"""What one worker process offers to all its sessions."""

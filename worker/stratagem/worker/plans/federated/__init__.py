"""What one client does in a round beside its training: what it keeps, corrects and codes."""

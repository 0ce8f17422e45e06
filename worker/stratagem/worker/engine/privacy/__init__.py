"""What a client does for its privacy before anything leaves: its change is clipped."""

"""What members of a party agree on when they meet."""

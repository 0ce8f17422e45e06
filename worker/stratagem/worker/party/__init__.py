"""The members of one run's party: how they meet and agree on one state."""

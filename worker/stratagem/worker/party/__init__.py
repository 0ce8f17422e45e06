"""The members of one run's party: how they meet, connect and agree on one state."""

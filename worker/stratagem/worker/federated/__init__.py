"""The client's side of secure aggregation: its secrets, its signatures, its masked update."""

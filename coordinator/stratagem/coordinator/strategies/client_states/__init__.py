"""What the clients of a federation keep to themselves, as the coordinator knows it."""

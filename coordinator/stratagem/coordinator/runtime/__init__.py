"""What the coordinator's process needs around the core: plug-ins and chores."""

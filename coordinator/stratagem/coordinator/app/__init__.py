"""The coordinator that leads, put together: its storage, listeners and chores."""

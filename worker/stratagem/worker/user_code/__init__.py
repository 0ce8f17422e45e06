"""The boundary to the user's code: its resolution by name, its errors, and its output."""

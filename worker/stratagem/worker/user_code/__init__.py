"""The boundary to the user's code: finding it by name, its errors, and its output."""

"""The border to the user's code: finding it by name, its errors, and what it prints."""

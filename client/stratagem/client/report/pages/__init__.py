"""Runs as pages of HTML that can be kept: no script, and nothing from elsewhere."""

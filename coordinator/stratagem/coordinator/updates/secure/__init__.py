"""The sum of masked updates."""

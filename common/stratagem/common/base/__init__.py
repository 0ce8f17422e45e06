"""Holds what every part of the system builds on: errors, identifiers, limits, durations,
addresses."""

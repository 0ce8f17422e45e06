"""What every part of the system builds on: errors, identifiers, limits, durations, addresses."""

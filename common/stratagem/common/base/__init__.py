"""This package holds the foundations of all parts: errors, identifiers, limits, units and files."""

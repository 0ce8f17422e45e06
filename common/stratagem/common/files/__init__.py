"""Files that are private, that appear whole or not at all, or are read again when they change."""

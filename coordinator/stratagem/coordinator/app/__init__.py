"""This package assembles the leading coordinator from its storage, listeners and chores."""

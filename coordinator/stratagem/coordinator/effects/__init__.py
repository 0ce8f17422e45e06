"""This package performs the effects that runs need."""

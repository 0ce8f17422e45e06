"""Derive the course of a run from its facts, by pure functions over its events, in order."""

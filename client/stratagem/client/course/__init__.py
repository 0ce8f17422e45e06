"""Derive the course of a run by pure functions: from its events, in order, and its step history."""

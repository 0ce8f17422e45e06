"""Observe runs by events, logs, profiles, and the reasons why a run waits."""

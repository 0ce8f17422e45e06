"""Observation of runs: events, logs, profiles, the reasons why a run waits."""

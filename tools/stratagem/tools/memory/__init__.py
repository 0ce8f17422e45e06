"""Finds out what a job will need before it runs: memory, and settings that fit."""

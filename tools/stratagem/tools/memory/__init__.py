"""Estimates of a job's needs before it runs: memory, and settings that fit."""

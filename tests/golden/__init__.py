"""Journals written by released versions, which later versions must replay to the same runs."""

"""Strategies of parties that train in step, and the evaluation of one state."""

"""This package holds the strategies of parties that train in step, or evaluate a state."""

"""This package reads the step history of runs in the client."""

"""How long the stages of a pipeline compute and wait."""

"""The decisions of the coordinator as pure functions: command in, facts out, state folded."""

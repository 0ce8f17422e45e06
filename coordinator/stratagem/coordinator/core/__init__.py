"""The values of the coordinator: facts, state, commands, effects, the contract of strategies."""

"""The core is the pure part of the coordinator: facts, state, commands, effects, and the contract
of strategies.
"""

"""The built-in training strategies: one file each, without inheritance.

Each is a value of `strategy_contract.Strategy`. Other packages register theirs in the entry-point
group ``stratagem.strategies``, under the name that `Custom` jobs give as coordinator. Nothing here
awaits, reads a clock or touches a tensor.
"""

"""The built-in training strategies are values of `strategy_contract.Strategy`, without
inheritance, clocks or tensors. Other packages register theirs in the entry-point group
``stratagem.strategies``, under the name that `Custom` jobs give as coordinator.
"""

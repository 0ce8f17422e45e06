"""How parameters are updated: optimizers, the learning rate, and whether a step is applied."""

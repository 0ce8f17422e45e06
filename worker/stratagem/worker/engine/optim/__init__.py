"""Updates of parameters: optimizers, the learning rate, and the check for finite gradients."""

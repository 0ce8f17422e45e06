"""Lists the optimizers and the keyword arguments that each takes, for places without torch.

The table is that of the torch that workers are installed with; a test compares the two. It leaves
out those that need a closure (LBFGS) or gradients of another kind (SparseAdam). A job is checked by
it when it is submitted; what a keyword may be, the optimizer says on the worker.
"""

from collections.abc import Mapping
from typing import Final

_ALL: Final = ("maximize", "weight_decay")
_ADAM: Final = ("betas", "differentiable", "eps", *_ALL)

KEYWORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "adadelta": ("differentiable", "eps", "rho", *_ALL),
    "adafactor": ("beta2_decay", "d", "eps", *_ALL),
    "adagrad": ("differentiable", "eps", "initial_accumulator_value", "lr_decay", *_ALL),
    "adam": ("amsgrad", "decoupled_weight_decay", *_ADAM),
    "adamax": _ADAM,
    "adamw": ("amsgrad", *_ADAM),
    "asgd": ("alpha", "differentiable", "lambd", "t0", *_ALL),
    "muon": (
        *("adjust_lr_fn", "eps", "momentum", "nesterov"),
        *("ns_coefficients", "ns_steps", "weight_decay"),
    ),
    "nadam": ("decoupled_weight_decay", "momentum_decay", *_ADAM),
    "radam": ("decoupled_weight_decay", *_ADAM),
    "rmsprop": ("alpha", "centered", "differentiable", "eps", "momentum", *_ALL),
    "rprop": ("differentiable", "etas", "maximize", "step_sizes"),
    "sgd": ("dampening", "differentiable", "momentum", "nesterov", *_ALL),
}
"""By name in small letters, besides `lr`, `schedule` and `clip_norm`, which all have."""

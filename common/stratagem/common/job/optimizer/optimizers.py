"""Lists the optimizers and the keyword arguments that each takes, for places without torch.

The table is that of the torch that workers are installed with; a test compares the two. It leaves
out those that need a closure (LBFGS) or gradients of another kind (SparseAdam). A job is checked by
it when it is submitted; what range a number may have, the optimizer says on the worker.
"""

from collections.abc import Mapping
from typing import Any, Final

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

_SWITCHES: Final = frozenset((
    *("amsgrad", "centered", "decoupled_weight_decay", "differentiable", "maximize", "nesterov"),
))  # fmt: skip
_SEVERAL: Final = {"betas": 2, "etas": 2, "ns_coefficients": 3, "step_sizes": 2}
"""Keywords that are lists, with their numbers of numbers."""
_OTHERS: Final = frozenset({"adjust_lr_fn"})


def why_no_value(optimizer: str, keyword: str, value: Any) -> str:
    """Return why a value is not of the kind that a keyword is; "" where it is."""
    if keyword in _SWITCHES:
        return "" if isinstance(value, bool | int) else f"{value!r} is not true or false"
    several = _SEVERAL.get(keyword)
    if optimizer == "adafactor" and keyword == "eps":  # its first may be none
        several, value = 2, [0 if item is None else item for item in _items(value)]
    if several is not None:
        items = _items(value)
        is_so = len(items) == several and all(map(_is_number, items))
        return "" if is_so else f"{value!r} is not a list of {several} numbers"
    return "" if keyword in _OTHERS or _is_number(value) else f"{value!r} is not a number"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []

"""Lists the optimizers and the keyword arguments that each takes, for places without torch.

The table is that of the torch that workers are installed with; a test compares the two. It leaves
out those that need a closure (LBFGS) or gradients of another kind (SparseAdam). A job is checked by
it when it is submitted; what a keyword may be, the optimizer says on the worker.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from stratagem.common.base.errors import Violation
from stratagem.common.job.optimizer.optimizer_section import OptimizerSpec
from stratagem.common.schema.json_text import not_one_of, suggest

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


def check_optimizer(spec: OptimizerSpec) -> Iterator[Violation]:
    """Yield the optimizer's name, or a keyword, that torch does not know."""
    known = KEYWORDS.get(spec.name.lower())
    if known is None:
        yield Violation("optimizer.name", not_one_of(spec.name, sorted(KEYWORDS)))
        return
    groups = [(f"optimizer.groups[{i}]", group.kwargs) for i, group in enumerate(spec.groups or ())]
    for path, kwargs in [("optimizer", spec.kwargs), *groups]:
        for key, value in kwargs.items():
            if key not in known:
                allowed = ", ".join(sorted(known))
                text = f"{value!r}, but {spec.name} takes no {key!r}{suggest(key, known)}"
                yield Violation(f"{path}.{key}", f"{text}; it takes {allowed}")

"""What a job must be for the steps of its clients to be corrected, `strategy.options.control`.

A client measures its mean gradient by how far its steps have led, so each step must be exactly the
learning rate times the gradient of its rows, weight decay included.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from stratagem.common.base.errors import Violation
from stratagem.common.job.optimizer.optimizer_section import GroupSpec, OptimizerSpec
from stratagem.common.strategy import Federated, Strategy

_CONTROL: Final = "strategy.options.control"
_TOGETHER: Final = "is not possible with strategy.options.control: scaffold"
AGAINST_CONTROL: Final = {
    "turns": "is not possible with turns, which have an optimizer each",
    "hyperparameter_schedule": "is not possible with hyperparameter_schedule; leave it out",
    "compression.codec": "is not possible with a codec, whose losses would add up in what clients "
    "keep; use compression.codec: none",
}
"""Sections that `control` does not go together with, and why."""
_THE_GRADIENT_ALONE: Final = (
    f"{_TOGETHER}: a step must be lr times the gradient alone; leave it out"
)
_NOT_THE_GRADIENT: Final = ("momentum", "nesterov", "dampening", "maximize")


def check_control_of(
    strategy: Strategy, optimizer: OptimizerSpec | None, sections: Collection[str]
) -> Iterator[Violation]:
    """Yield what does not go together with the correction of clients' steps. sections: those of
    AGAINST_CONTROL that the job has."""
    if not isinstance(strategy, Federated) or strategy.options.control is None:
        return
    for name, text in AGAINST_CONTROL.items():
        if name in sections:
            yield Violation(_CONTROL, text)
    if optimizer is not None:
        yield from _against_optimizer(optimizer)
        for place, group in enumerate(optimizer.groups or ()):
            yield from _against_group(group, f"optimizer.groups[{place}]")


def _against_optimizer(optimizer: OptimizerSpec) -> Iterator[Violation]:
    if (optimizer.name or "").lower() != "sgd":
        text = f"{optimizer.label} {_TOGETHER}, which measures gradients by steps of sgd; use that"
        yield Violation("optimizer.name", text)
    if optimizer.clip_norm is not None:
        text = f"{optimizer.clip_norm:g} {_TOGETHER}: clipped steps tell no gradient; leave it out"
        yield Violation("optimizer.clip_norm", text)
    if optimizer.schedule is not None and optimizer.schedule.entrypoint is not None:
        text = f"{_TOGETHER}: rates must stay the same within a round"
        yield Violation("optimizer.schedule.entrypoint", text)
    yield from _against_keywords(optimizer.kwargs, "optimizer")


def _against_group(group: GroupSpec, path: str) -> Iterator[Violation]:
    if group.optimizer is not None:
        yield Violation(f"{path}.optimizer", f"{group.optimizer.label} {_THE_GRADIENT_ALONE}")
    yield from _against_keywords(group.kwargs, path)


def _against_keywords(kwargs: Mapping[str, Any], path: str) -> Iterator[Violation]:
    for key in _NOT_THE_GRADIENT:
        if kwargs.get(key):
            yield Violation(f"{path}.{key}", f"{kwargs[key]} {_THE_GRADIENT_ALONE}")

"""What a job must be for clients to count otherwise than by rows.

With `strategy.options.q` a client's change of the model stands for a gradient of one loss, at one
learning rate. With `strategy.options.normalize` it is known how far its steps can go.
"""

from collections.abc import Collection, Iterator
from typing import Final

from stratagem.common.base.errors import Violation
from stratagem.common.job.optimizer.optimizer_section import OptimizerSpec
from stratagem.common.strategy import Federated, FedProx, Strategy

_Q: Final = "strategy.options.q"
_NORMALIZE: Final = "strategy.options.normalize"
AGAINST_Q: Final = {
    "privacy": "is not possible with privacy: each client would tell the loss of its rows",
    "data.streams": "is not possible with a stream of rows, which would be read once more",
    "turns": "is not possible with turns, which have a loss and a rate each",
}
"""Sections that `q` does not go together with, and why."""
AGAINST_NORMALIZE: Final = {
    "privacy": "is not possible with privacy: a change would count more than it is clipped to",
    "turns": "is not possible with turns, which have an optimizer each",
    "hyperparameter_schedule": "is not possible with hyperparameter_schedule; leave it out",
}
"""Sections that `normalize` does not go together with, and why."""
MOMENTUM: Final = "momentum"


def check_weighing_of(
    strategy: Strategy, optimizer: OptimizerSpec | None, sections: Collection[str]
) -> Iterator[Violation]:
    """Yield what does not go together with how the rounds of the strategy weigh updates.

    sections: those of the tables above that the job has.
    """
    if not isinstance(strategy, Federated):
        return
    if strategy.options.q is not None:
        yield from _against_q(optimizer, sections)
    if strategy.options.normalize is not None:
        yield from _against_normalize(strategy, optimizer, sections)


def _against_q(optimizer: OptimizerSpec | None, sections: Collection[str]) -> Iterator[Violation]:
    for name, text in AGAINST_Q.items():
        if name in sections:
            yield Violation(_Q, text)
    if optimizer is None:
        return
    if (optimizer.name or "").lower() != "sgd":
        text = f"{optimizer.label} is not possible with {_Q}, which takes its changes for gradients"
        yield Violation("optimizer.name", f"{text} times lr; use sgd")
    one = f"is not possible with {_Q}, which has one learning rate for all"
    if optimizer.schedule is not None:
        yield Violation("optimizer.schedule", f"{one} rounds; leave it out")
    if "hyperparameter_schedule" in sections:
        yield Violation("hyperparameter_schedule", f"{one} rounds; leave it out")
    for place, group in enumerate(optimizer.groups or ()):
        if group.lr is not None or group.optimizer is not None:
            name = "lr" if group.lr is not None else "optimizer"
            yield Violation(f"optimizer.groups[{place}].{name}", f"{one} parameters; leave it out")


def _against_normalize(
    strategy: Federated, optimizer: OptimizerSpec | None, sections: Collection[str]
) -> Iterator[Violation]:
    for name, text in AGAINST_NORMALIZE.items():
        if name in sections:
            yield Violation(_NORMALIZE, text)
    if optimizer is None:
        return
    if (optimizer.name or "").lower() != "sgd":
        text = f"{optimizer.label} is not possible with {_NORMALIZE}: how far its steps go is known"
        yield Violation("optimizer.name", f"{text} of sgd alone; use that")
    for key in ("nesterov", "dampening"):
        if optimizer.kwargs.get(key):
            text = f"is not possible with {_NORMALIZE}, which is defined for plain momentum"
            yield Violation(f"optimizer.{key}", text)
    for place, group in enumerate(optimizer.groups or ()):
        own = [key for key in (MOMENTUM, "nesterov", "dampening") if key in group.kwargs]
        for key in [*own, *(["optimizer"] if group.optimizer is not None else [])]:
            text = f"is not possible with {_NORMALIZE}: all parameters go as far in a step"
            yield Violation(f"optimizer.groups[{place}].{key}", text)
    if optimizer.schedule is not None and optimizer.schedule.entrypoint is not None:
        text = f"is not possible with {_NORMALIZE}: rates must stay the same within a round"
        yield Violation("optimizer.schedule.entrypoint", text)
    if isinstance(strategy.aggregation, FedProx) and strategy.aggregation.mu:
        yield from _against_pull(strategy.aggregation.mu, optimizer)


def _against_pull(mu: float, optimizer: OptimizerSpec) -> Iterator[Violation]:
    """Yield why it is not known how far steps go that FedProx pulls back."""
    together = f"is not possible with FedProx and {_NORMALIZE} together"
    if optimizer.kwargs.get(MOMENTUM):
        yield Violation(f"optimizer.{MOMENTUM}", f"{together}; use one of the two")
    if optimizer.schedule is not None:
        yield Violation("optimizer.schedule", f"{together}: lr · mu is one number for all rounds")
    for place, group in enumerate(optimizer.groups or ()):
        if group.lr is not None:
            text = f"{together}: lr · mu is one number for all parameters"
            yield Violation(f"optimizer.groups[{place}].lr", text)
    if optimizer.lr * mu >= 1:
        text = f"{mu:g} is too much with {_NORMALIZE}: lr · mu must be below 1"
        yield Violation("strategy.aggregation.mu", f"{text}, is {optimizer.lr * mu:g}")

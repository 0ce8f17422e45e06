"""What a job must be for `strategy.options.q`: clients whose change of the model stands for a
gradient of one loss, at one learning rate."""

from collections.abc import Collection, Iterator
from typing import Final

from stratagem.common.base.errors import Violation
from stratagem.common.job.optimizer.optimizer_section import OptimizerSpec
from stratagem.common.strategy import Federated, Strategy

_Q: Final = "strategy.options.q"
AGAINST_Q: Final = {
    "privacy": "is not possible with privacy: each client would tell the loss of its rows",
    "data.streams": "is not possible with a stream of rows, which would be read once more",
    "turns": "is not possible with turns, which have a loss and a rate each",
}
"""Sections that `q` does not go together with, and why."""


def check_weighing_of(
    strategy: Strategy, optimizer: OptimizerSpec | None, sections: Collection[str]
) -> Iterator[Violation]:
    """Yield what does not go together with how the rounds of the strategy weigh updates.

    sections: those of `AGAINST_Q` that the job has, and "hyperparameter_schedule".
    """
    if not isinstance(strategy, Federated) or strategy.options.q is None:
        return
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

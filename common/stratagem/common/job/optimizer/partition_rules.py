"""The settings that go together with a divided state (`strategy.options.partition_state`).

Each worker steps its own slice of all parameters. So an optimizer must make of each element what it
makes of it with the whole parameter, to the last bit, and what needs whole gradients finds none.
With `full` what needs whole parameters between the passes of a model finds none, either.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from stratagem.common.base.errors import Violation
from stratagem.common.job.optimizer.optimizer_section import OptimizerSpec
from stratagem.common.strategy import Strategy, partitions_parameters, partitions_state

BY_ELEMENT: Final = (
    *("adadelta", "adagrad", "adam", "adamax", "adamw", "nadam", "radam", "rmsprop", "sgd"),
)
"""Optimizers whose bits are the same for slices of a parameter; tests compare them."""
OF_WHOLE_GRADIENTS: Final = {
    "compression": "it codes gradients for workers that need all of them",
    "phases": "a prediction is made from whole gradients",
    "turns": "each would need slices of its own",
}
"""Sections that do not go together with it, and why."""
OF_WHOLE_PARAMETERS: Final = {
    "weight_average": "it is an average of whole parameters, which no worker has after a step",
    "execution.mode": "compiled code would hold parameters that come and go; Eager does not",
    "execution.precision": "Half makes copies of all parameters at once; Mixed of one at a time",
}
"""Settings that do not go together with `full`, and why: a section, a mode that compiles, Half."""
_FIELD: Final = "strategy.options.partition_state"


def check_partition(
    strategy: Strategy, optimizer: OptimizerSpec | None, settings: Iterable[str]
) -> Iterator[Violation]:
    """Yield what contradicts a divided state, where the strategy has one.

    optimizer: None where turns have theirs. settings: those of `OF_WHOLE_GRADIENTS` and
    `OF_WHOLE_PARAMETERS` that the job has.
    """
    yield from _below(strategy, "strategy")
    if not partitions_state(strategy):
        return
    for each in () if optimizer is None else optimizer.rules():
        if each.rule.label.lower() not in BY_ELEMENT or each.rule.name is None:
            text = (
                f'"{each.rule.label}" is not known to have the same bits for slices of a '
                f"parameter, as {_FIELD} needs it; known are {', '.join(BY_ELEMENT)}"
            )
            yield Violation(
                f"{each.path}.{'entrypoint' if each.rule.name is None else 'name'}", text
            )
    for name in settings:
        if name in OF_WHOLE_GRADIENTS:
            yield Violation(name, f"is not allowed with {_FIELD}: {OF_WHOLE_GRADIENTS[name]}")
        elif partitions_parameters(strategy):
            text = f"is not allowed with {_FIELD}: full: {OF_WHOLE_PARAMETERS[name]}"
            yield Violation(name, text)


def _below(strategy: Strategy, path: str) -> Iterator[Violation]:
    """Yield the strategies inside of others that divide a state."""
    inner: Strategy | None = getattr(getattr(strategy, "options", None), "inner", None)
    if inner is None:
        return
    path = f"{path}.options.inner"
    if partitions_state(inner):
        text = "is possible in a strategy of its own only, not inside of another one"
        yield Violation(f"{path}.options.partition_state", text)
    yield from _below(inner, path)

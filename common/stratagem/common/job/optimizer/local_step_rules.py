"""The settings that go together with local steps (`strategy.options.local_steps`).

Between two joins of the replicas there is no model that all of them have: what follows one model
from step to step has nothing to follow, and what is committed or evaluated is where they meet.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from stratagem.common.base.errors import Violation
from stratagem.common.base.wording import counted
from stratagem.common.strategy import Strategy, local_steps_of

OF_ONE_MODEL: Final = {
    "compression": "it codes gradients of single steps, which are not exchanged",
    "phases": "each replica has gradients of its own to predict from",
    "weight_average": "each replica has parameters of its own",
    "turns": "a replica has one optimizer",
    "hyperparameter_schedule": "it may change between two joins of the replicas",
}
"""Sections that do not go together with local steps, and why."""


def check_local_steps(
    strategy: Strategy, periods: Mapping[str, tuple[int, str]], sections: Iterable[str]
) -> Iterator[Violation]:
    """Yield what contradicts local steps, where the strategy has them.

    periods: by field (count, unit) of what is done at intervals. sections: those of `OF_ONE_MODEL`
    that the job has.
    """
    yield from _below(strategy, "strategy")
    local_steps = local_steps_of(strategy)
    if local_steps is None:
        return
    for name, (count, unit) in periods.items():
        yield from _not_a_multiple(name, count, unit, local_steps)
    for name in sections:
        text = f"is not allowed with strategy.options.local_steps: {OF_ONE_MODEL[name]}"
        yield Violation(name, text)


def _below(strategy: Strategy, path: str) -> Iterator[Violation]:
    """Yield the strategies inside of others that have local steps."""
    inner: Strategy | None = getattr(getattr(strategy, "options", None), "inner", None)
    if inner is None:
        return
    path = f"{path}.options.inner"
    if local_steps_of(inner) is not None:
        text = "is possible in a strategy of its own only, not inside of another one"
        yield Violation(f"{path}.options.local_steps", text)
    yield from _below(inner, path)


def _not_a_multiple(name: str, count: int, unit: str, local_steps: int) -> Iterator[Violation]:
    what = (
        f"'{counted(count, unit)}' is not allowed: the replicas are joined only after each "
        f"strategy.options.local_steps, {local_steps}"
    )
    if unit != "step":
        yield Violation(name, f"{what}; count in steps, a multiple of it")
    elif count % local_steps:
        below = count - count % local_steps
        nearest = [each for each in (below, below + local_steps) if each]
        texts = " or ".join(f"'{counted(each, 'step')}'" for each in nearest)
        yield Violation(name, f"{what}; the nearest is {texts}")

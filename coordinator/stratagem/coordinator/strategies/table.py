"""Finds the strategy of a job among the registered ones."""

from functools import cache
from importlib.metadata import entry_points

from stratagem.common.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.coordinator.strategies.contract import Strategy

GROUP = "stratagem.strategies"


@cache
def registered() -> tuple[str, ...]:
    """The names under which strategies are registered, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


@cache
def by_name(name: str) -> Strategy:
    """The strategy registered under a name."""
    for point in entry_points(group=GROUP, name=name):
        strategy: Strategy = point.load()
        return strategy
    known = ", ".join(registered())
    message = f"{name!r} has no implementation on this coordinator; registered are {known}"
    raise InvalidInputError.at("strategy.type", message)


def strategy_of(job: JobSpec) -> Strategy:
    """The strategy that runs a job: by coordinator name for Custom, else by type."""
    return by_name(getattr(job.strategy, "coordinator", type(job.strategy).__name__))

"""Finds the strategy of a job among the registered ones."""

from functools import cache
from importlib.metadata import entry_points

from stratagem.common.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated, Local
from stratagem.coordinator.strategies import evaluating, missing
from stratagem.coordinator.strategies.contract import Strategy

GROUP = "stratagem.strategies"


@cache
def registered() -> tuple[str, ...]:
    """The names under which strategies are registered, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def name_of(job: JobSpec) -> str:
    """The name under which a job's strategy is registered: for Custom its coordinator's.

    Federated clients that are parties of their own have an implementation of its own.
    """
    strategy = job.strategy
    if isinstance(strategy, Federated) and strategy.options.inner not in (None, Local()):
        return "FederatedSilos"
    return str(getattr(strategy, "coordinator", type(strategy).__name__))


def strategy_of(job: JobSpec) -> Strategy:
    """The strategy that runs a job; one that is not installed (any more) has a stand-in."""
    if job.only_evaluates:
        return evaluating
    return _load(name_of(job)) or missing


def require(job: JobSpec) -> Strategy:
    """The strategy that runs a job; raises InvalidInputError when it is not installed."""
    if job.only_evaluates:
        return evaluating
    strategy = _load(name_of(job))
    if strategy is None:
        known = ", ".join(registered())
        message = f"{name_of(job)!r} has no implementation here; registered are {known}"
        raise InvalidInputError.at("strategy.type", message)
    return strategy


@cache
def _load(name: str) -> Strategy | None:
    for point in entry_points(group=GROUP, name=name):
        strategy: Strategy = point.load()
        return strategy
    return None

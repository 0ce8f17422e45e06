"""Finds the strategy of a job among the registered ones."""

from functools import cache
from importlib.metadata import entry_points

from stratagem.common.errors import InvalidInputError
from stratagem.common.failures import told
from stratagem.common.job import JobSpec
from stratagem.common.json_text import suggest
from stratagem.common.strategy import Custom, Federated, Local, ModelParallel
from stratagem.coordinator.strategies import evaluating, missing
from stratagem.coordinator.strategies.contract import Strategy

GROUP = "stratagem.strategies"
SILOS = "FederatedSilos"
BUILT_IN = frozenset(
    {"DataParallel", "Federated", SILOS, "Local", "ModelParallel", "PopulationBased"}
)
"""Of this package. Each reads a strategy of its own type, so Custom cannot name them."""


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
        return SILOS
    return str(getattr(strategy, "coordinator", type(strategy).__name__))


def strategy_of(job: JobSpec) -> Strategy:
    """The strategy that runs a job; one that is not installed (any more) has a stand-in."""
    if _is_evaluated_in_shares(job):
        return evaluating
    return _find(job) or missing


def is_installed(job: JobSpec) -> bool:
    """False where a stand-in speaks for the strategy of a job."""
    return strategy_of(job) is not missing


def require(job: JobSpec) -> Strategy:
    """The strategy that runs a job; raises InvalidInputError when it is not installed."""
    if _is_evaluated_in_shares(job):
        return evaluating
    found = _find(job)
    if found is None:
        field = "coordinator" if isinstance(job.strategy, Custom) else "type"
        raise InvalidInputError.at(f"strategy.{field}", _why_not(job))
    return found


def _find(job: JobSpec) -> Strategy | None:
    name = name_of(job)
    return None if isinstance(job.strategy, Custom) and name in BUILT_IN else _load(name)


def _why_not(job: JobSpec) -> str:
    name = name_of(job)
    if isinstance(job.strategy, Custom) and name in BUILT_IN:
        return f"{name!r} is built in and reads no config; write its own type"
    for point in entry_points(group=GROUP, name=name):
        try:
            point.load()
        except Exception as error:  # code of another package
            return f"{name!r} cannot be imported: {told(error)}"
    packages = [each for each in registered() if each not in BUILT_IN]
    known = ", ".join(packages) or f"none (entry-point group {GROUP})"
    return f"{name!r} has no implementation here; registered are {known}{suggest(name, packages)}"


def _is_evaluated_in_shares(job: JobSpec) -> bool:
    """Of a model that is cut all members evaluate all batches: a segment without steps."""
    return job.only_evaluates and not isinstance(job.strategy, ModelParallel)


@cache
def _load(name: str) -> Strategy | None:
    for point in entry_points(group=GROUP, name=name):
        try:
            strategy: Strategy = point.load()
        except Exception:  # code of another package; `require` says what it raised
            return None
        return strategy
    return None

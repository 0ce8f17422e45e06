"""The table of the strategies that a coordinator has, as a value: made once, at the start of the
process, and passed to the core with its first state, so that the core imports no strategy."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.schema.json import suggest
from stratagem.common.strategy import Custom, Federated, Local, ModelParallel, describe
from stratagem.coordinator.core.facts import RunFailed
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.strategy_contract import VERSION, Status, Strategy

GROUP = "stratagem.strategies"
"""The entry points under which packages register strategies."""

SILOS = "FederatedSilos"
REGIONAL = "FederatedRegions"
EVALUATION = "Evaluation"
SCHEDULED = "Scheduled"


@dataclass(frozen=True, slots=True)
class Strategies:
    """Every strategy that jobs can have on this coordinator, by name."""

    built_in: Mapping[str, Strategy]
    """Built-in strategies. Each reads a job strategy of its own type, so Custom cannot name it."""
    installed: Mapping[str, Strategy] = field(default_factory=dict)
    """Strategies of other packages, for Custom."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """By name, why a registered strategy cannot be used."""

    def of(self, job: JobSpec) -> Strategy:
        """Return the strategy that runs a job, or a stand-in (MISSING) when it is not installed
        (any more)."""
        return self._find(job) or MISSING

    def require(self, job: JobSpec) -> Strategy:
        """Return the strategy that runs a job; raise InvalidInputError when it is not installed."""
        strategy = self._find(job)
        if strategy is None:
            field = "coordinator" if isinstance(job.strategy, Custom) else "type"
            raise InvalidInputError.at(f"strategy.{field}", self.why_not(job))
        return strategy

    def _find(self, job: JobSpec) -> Strategy | None:
        is_custom = isinstance(job.strategy, Custom) and not _is_evaluated_in_shares(job)
        return (self.installed if is_custom else self.built_in).get(_name_of(job))

    def why_not(self, job: JobSpec) -> str:
        """Return why there is no implementation of a job's strategy, as a sentence."""
        name = _name_of(job)
        if isinstance(job.strategy, Custom) and name in self.built_in:
            return f"{name!r} is built in and reads no config; write its own type"
        if name in self.broken:
            return self.broken[name]
        packages = sorted(self.installed)
        known = ", ".join(packages) or f"none (entry-point group {GROUP})"
        hint = suggest(name, packages)
        return f"{name!r} has no implementation here; registered are {known}{hint}"


def _name_of(job: JobSpec) -> str:
    """Return the name that a job's strategy has here: for Custom its coordinator's.

    Federated clients that are parties of their own have an implementation of its own, so have those
    that are federations, jobs whose hyperparameters change by step, and those that train nothing.
    """
    if _is_evaluated_in_shares(job):
        return EVALUATION
    if job.hyperparameter_schedule is not None:
        return SCHEDULED
    strategy = job.strategy
    if isinstance(strategy, Federated) and isinstance(strategy.options.inner, Federated):
        return REGIONAL
    if isinstance(strategy, Federated) and strategy.options.inner not in (None, Local()):
        return SILOS
    return str(getattr(strategy, "coordinator", type(strategy).__name__))


def _is_evaluated_in_shares(job: JobSpec) -> bool:
    """Return True when members evaluate disjoint shares of the batches. With a model that is cut
    all members evaluate all batches instead, as a segment without steps."""
    return job.only_evaluates and not isinstance(job.strategy, ModelParallel)


def _why_missing(job: JobSpec, strategies: Strategies) -> str:
    text = f"the strategy {describe(job.strategy)} is not installed on this coordinator"
    name = _name_of(job)
    return f"{text}: {strategies.broken[name]}" if name in strategies.broken else text


MISSING = Strategy(
    version=VERSION,
    init=lambda job, _party, strategies: _why_missing(job, strategies),
    decide=lambda _job, reason, _world, _now_s: RunFailed(reason=reason),
    transition=lambda _job, reason, _fact, _now_s: reason,
    reject_reason=lambda _job, reason, _fact: str(reason),
    pending=lambda _run_id, _job, _reason, _horizon: frozenset(),
    status=lambda _job, reason, _world: Status(RunPhase.PLACING, "WAITING", reason),
)
"""Stands in for a strategy whose package is no longer installed: its runs fail with the reason,
which is their run value, and can be resumed once the package is back."""

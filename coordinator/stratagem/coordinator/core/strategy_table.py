"""The strategies that a coordinator has, as a value: made once, at the start of the process, and
handed to the core with its first state. So the core imports none of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.schema.json_text import suggest
from stratagem.common.strategy import Custom, Federated, Local, ModelParallel
from stratagem.coordinator.core import missing_strategy
from stratagem.coordinator.core.strategy_contract import Strategy

GROUP = "stratagem.strategies"
"""The entry points under which packages register strategies."""

SILOS = "FederatedSilos"
EVALUATION = "Evaluation"


@dataclass(frozen=True, slots=True)
class Strategies:
    """Every strategy that jobs can have here, by name."""

    built_in: Mapping[str, Strategy]
    """Each reads a strategy of its own type, so Custom cannot name it."""
    installed: Mapping[str, Strategy] = field(default_factory=dict)
    """Of other packages, for Custom."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Why others that are registered cannot be used."""

    def of(self, job: JobSpec) -> Strategy:
        """The strategy that runs a job; one that is not installed (any more) has a stand-in."""
        return self._find(job) or missing_strategy

    def require(self, job: JobSpec) -> Strategy:
        """The strategy that runs a job; raises InvalidInputError when it is not installed."""
        found = self._find(job)
        if found is None:
            field = "coordinator" if isinstance(job.strategy, Custom) else "type"
            raise InvalidInputError.at(f"strategy.{field}", self._why_not(job))
        return found

    def _find(self, job: JobSpec) -> Strategy | None:
        is_custom = isinstance(job.strategy, Custom) and not _is_evaluated_in_shares(job)
        return (self.installed if is_custom else self.built_in).get(_name_of(job))

    def _why_not(self, job: JobSpec) -> str:
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
    """The name that a job's strategy has here: for Custom its coordinator's.

    Federated clients that are parties of their own have an implementation of its own, and so has
    every job that trains nothing.
    """
    if _is_evaluated_in_shares(job):
        return EVALUATION
    strategy = job.strategy
    if isinstance(strategy, Federated) and strategy.options.inner not in (None, Local()):
        return SILOS
    return str(getattr(strategy, "coordinator", type(strategy).__name__))


def _is_evaluated_in_shares(job: JobSpec) -> bool:
    """Of a model that is cut all members evaluate all batches: a segment without steps."""
    return job.only_evaluates and not isinstance(job.strategy, ModelParallel)

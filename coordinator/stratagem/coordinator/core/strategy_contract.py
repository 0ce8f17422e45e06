"""This module defines version 2 of the contract between the coordinator and a strategy, and the
table of strategies.

A strategy is a value: pure functions over a frozen run value of its own choosing. It acts for one
party of a run: the root, or a party that the enclosing strategy has made. The run value carries
the path of its party, and so does every fact and effect of it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.base.ids import Digest, Party, RunId, WorkerId, is_within
from stratagem.common.job import JobSpec
from stratagem.common.schema.json import suggest
from stratagem.common.strategy import Custom, Federated, Local, ModelParallel, describe
from stratagem.coordinator.core.effects import Base, Effect
from stratagem.coordinator.core.facts import Fact, Member, ProcessDied, RunFailed, Setting
from stratagem.coordinator.core.state import RunPhase, World

# ---- Contract ----

VERSION = 2


@dataclass(frozen=True, slots=True)
class Origin:
    """The member of a population that a commit comes from, and how it was trained."""

    member: int
    schedule: tuple[Setting, ...]
    """The settings that its state was trained with, in order of step; the last is its score's."""


@dataclass(frozen=True, slots=True)
class RunCounts:
    """What a run counts, and what it has to show besides its steps."""

    unit: str = "steps"
    """What step and num_steps of the status count: steps, rounds or generations."""
    steps_per_epoch: int = 0
    """0 where epochs say nothing."""
    part_done: float = 0.0
    """Of the unit that is under way, from 0 to below 1; 0 where it is not known."""
    is_even: bool = True
    """False where the units of several members overlap, so that no pace follows from them."""
    loss: float = 0.0
    """Of the newest unit; 0 where the steps themselves say it."""
    num_clients_rejected: int = 0
    num_clients_late: int = 0
    best: float | None = None
    """For a population: the best value of its newest closed generation."""
    best_member: int | None = None
    num_copied: int = 0
    """For a population: members that were replaced by copies after that generation."""


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a run as shown to people: its phase, its progress, and its members."""

    phase: RunPhase
    strategy_phase: str
    reason: str
    step: int = 0
    num_steps: int = 0
    segment: int = 0
    num_segments: int = 0
    num_clients_done: int = 0
    num_clients: int = 0
    members: tuple[Member, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[int, Origin] = field(default_factory=dict)
    """Origins of a population's kept commits, by segment."""
    counts: RunCounts = field(default_factory=RunCounts)


@dataclass(frozen=True, slots=True)
class PartyView:
    """The members that exchange tensors with each other, in order of rank."""

    membership: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class RejectedClient:
    """A client of a federation whose updates did not count in some rounds."""

    client: int
    worker_id: WorkerId
    """The worker that the client lives on, or trains on unless that worker is lost."""
    num_rounds: int
    reason: str
    """Reason of the newest rejection."""


@dataclass(frozen=True, slots=True)
class NestedProgress:
    """The progress of a party, as reported to the strategy around it."""

    committed: Base | None
    metrics: Mapping[str, float]
    """Metrics of the committed segment."""
    num_rows: Mapping[str, int]
    """Rows of each split that the party trains on; empty until the model is built."""
    loss: float
    """Mean training loss of the newest segment, committed or not; 0 when not known."""
    is_idle: bool
    """True when no trained segment waits for its commit or its evaluation."""
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that were sent in the newest segment, as in SegmentFinished."""
    keeps_more: bool = False
    """The party needs more of its past than the committed state, and an earlier one lacks it."""
    rejected: tuple[RejectedClient, ...] = ()
    """Clients rejected in closed rounds since the party was begun or rebased."""


@dataclass(frozen=True, slots=True)
class Nesting:
    """The functions with which a strategy continues from a given state: inside another strategy,
    segment by segment, and from an earlier commit of its run."""

    progress: Callable[[Any], NestedProgress]
    """(value): the progress of the party."""
    rebase: Callable[[JobSpec, Any, Base, Mapping[str, int]], Any]
    """(job, value, base, num_rows): the value after a state was given, as if it had just been
    committed here. num_rows: as in NestedProgress, for a party that has not built the model."""
    returned: Callable[[JobSpec, Any, Base, Mapping[str, float]], Any] | None = None
    """(job, value, base, metrics): the value after the party went back to an earlier commit of its
    own, with its metrics; None: as by rebase. What was still owed to it, and to those before, is
    still owed."""


@dataclass(frozen=True, slots=True)
class Child:
    """A party inside a strategy, run by a strategy of its own; see nested.py."""

    party: Party
    job: JobSpec
    strategy: "Strategy"
    """The strategy that runs the party."""
    value: Any
    """The run value of that strategy."""
    horizon: int
    """The last segment that it may train for now."""


def _none(*_: object) -> tuple[()]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """The functions of one strategy. Those without a default every strategy must have; the methods
    add what its children say, and are what the coordinator calls."""

    version: int
    """Version of this contract that the strategy was written for."""
    init: Callable[[JobSpec, Party, "Strategies"], Any]
    """(job, party, strategies): the run value before anything has happened. The strategies are for
    parties inside this one."""
    decide: Callable[[JobSpec, Any, World, float], Fact | None]
    """(job, value, world, now_s): the next fact that follows from how things stand, if any. Asked
    again after each fact until it answers None; so one decision at a time."""
    transition: Callable[[JobSpec, Any, Fact, float], Any]
    """(job, value, fact, now_s): the run value with one journaled fact folded in; now_s is the time
    of the journal."""
    reject_reason: Callable[[JobSpec, Any, Fact], str]
    """(job, value, fact): why a fact that an effect reports is stale or unexpected; "" for one that
    is neither."""
    pending: Callable[[RunId, JobSpec, Any, int | None], frozenset[Effect]]
    """(run_id, job, value, horizon): all that the party now needs done; no segment beyond the
    horizon is begun, unless that is None."""
    status: Callable[[JobSpec, Any, World], Status]
    """(job, value, world): the run's status, for people."""

    check: Callable[[JobSpec, "Strategies"], list[Violation]] = lambda *_: []
    """(job, strategies): what is wrong with this job under this strategy; asked once, at submit."""
    own_deadline: Callable[[Any], float | None] = lambda _: None
    """(value): leader-clock time at which decide should be asked again even if nothing happens."""
    own_parties: Callable[[Any], Mapping[Party, PartyView]] = lambda _: {}
    """(value): the parties whose members exchange tensors among themselves."""
    own_deaths: Callable[[Any, Member], tuple[ProcessDied, ...]] = _none
    """(value, member): a worker process has ended unasked: what it was working on."""
    own_reform: Callable[[Any, Party, str], Fact | None] = lambda *_: None
    """(value, party, reason): a new membership for a party whose exchange has failed although all
    its members live."""
    own_setback: Callable[[JobSpec, Any], str] = lambda *_: ""
    """(job, value): what the members of the party would lose by that, as the end of its reason; ""
    where they go on with what they hold."""
    own_blobs: Callable[[Any], frozenset[Digest]] = lambda _: frozenset()
    """(value): the states that may still be needed, besides those of the run's commits."""
    children: Callable[[Any], Iterable[Child]] = _none
    """(value): the parties inside this one."""
    working: Callable[[Any], Iterable[Child]] | None = None
    """(value): those of them that have work now; None: all. A death is counted against no other."""
    nesting: Nesting | None = None
    """None: it runs neither inside another strategy nor from an earlier commit."""

    def _working(self, value: Any) -> Iterable[Child]:
        return (self.working or self.children)(value)

    def next_deadline(self, value: Any) -> float | None:
        """Return the earliest deadline of the party and of all that work inside it."""
        inside = (child.strategy.next_deadline(child.value) for child in self._working(value))
        deadlines = (self.own_deadline(value), *inside)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def parties(self, value: Any) -> Mapping[Party, PartyView]:
        """Return the parties that exchange tensors, from this one down."""
        parties = dict(self.own_parties(value))
        for child in self.children(value):
            parties.update(child.strategy.parties(child.value))
        return parties

    def deaths_to_charge(self, value: Any, member: Member) -> tuple[ProcessDied, ...]:
        """Return the deaths to count, from this party down, for a worker whose process has ended
        unasked: one for each piece of work that it was at."""
        inside = (
            death
            for child in self._working(value)
            for death in child.strategy.deaths_to_charge(child.value, member)
        )
        return (*self.own_deaths(value, member), *inside)

    def reform(self, job: JobSpec, value: Any, party: Party, reason: str) -> Fact | None:
        """Return a new membership for this party or one below."""
        for child in self.children(value):
            if is_within(party, child.party):
                return child.strategy.reform(child.job, child.value, party, reason)
        return self.own_reform(value, party, reason + self.own_setback(job, value))

    def party_job(self, job: JobSpec, value: Any, party: Party) -> JobSpec:
        """Return the job that a party, this one or one below, trains."""
        for child in self.children(value):
            if is_within(party, child.party):
                return child.strategy.party_job(child.job, child.value, party)
        return job

    def blobs(self, value: Any) -> frozenset[Digest]:
        """Return the states that this party and those below may still need."""
        inside = (child.strategy.blobs(child.value) for child in self.children(value))
        return self.own_blobs(value).union(*inside)


# ---- Table of strategies ----
#
# The table is a value that is made once, when the process starts, and is passed to the core with
# its first state. The core therefore imports no strategy.

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

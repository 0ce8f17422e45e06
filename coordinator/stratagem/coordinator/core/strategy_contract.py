"""Version 2 of the contract between the coordinator and a strategy, and the table of strategies.

A strategy is a value: pure functions over a frozen run value of its own type. It acts for one party
of a run: the root, or a party that the enclosing strategy has made. The run value, and every fact
and effect of the strategy, names the party by its path.
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
from stratagem.coordinator.core.facts import (
    Fact,
    Member,
    PartyFailed,
    ProcessDied,
    RunFailed,
    Setting,
)
from stratagem.coordinator.core.world import RunPhase, World

# ---- Contract ----

VERSION = 2


@dataclass(frozen=True, slots=True)
class Origin:
    """The member of a population that a commit comes from, and the settings it was trained with."""

    member: int
    schedule: tuple[Setting, ...]
    """The settings that the state was trained with, by step; the last one led to the score."""


@dataclass(frozen=True, slots=True)
class RunCounts:
    """The progress of a run in its own unit, such as rounds, and values to show with it."""

    unit: str = "steps"
    """The unit of step and num_steps in the status: steps, rounds or generations."""
    steps_per_epoch: int = 0
    """The number of steps in an epoch; 0 if the run has no epochs."""
    part_done: float = 0.0
    """The fraction of the current unit that is done, from 0 to below 1; 0 if not known."""
    is_even: bool = True
    """False if the units of several members overlap, so that no pace follows from them."""
    loss: float = 0.0
    """The loss of the newest unit; 0 if the steps themselves report it."""
    num_clients_rejected: int = 0
    num_clients_late: int = 0
    best: float | None = None
    """The best value of a population's newest closed generation."""
    best_member: int | None = None
    num_copied: int = 0
    """The members of a population that were replaced by copies after that generation."""


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
    """The origins of a population's kept commits, keyed by segment."""
    counts: RunCounts = field(default_factory=RunCounts)


@dataclass(frozen=True, slots=True)
class PartyView:
    """The members of a party, which exchange tensors with each other, in order of rank."""

    membership: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class RejectedClient:
    """A client of a federation whose updates did not count in some rounds."""

    client: int
    worker_id: WorkerId
    """The worker that the client is bound to, or prefers to train on."""
    num_rounds: int
    reason: str
    """The reason of the newest rejection."""


@dataclass(frozen=True, slots=True)
class NestedProgress:
    """The progress of a party, as reported to the strategy around it."""

    committed: Base | None
    metrics: Mapping[str, float]
    """Metrics of the committed segment."""
    num_rows: Mapping[str, int]
    """Rows that the party trains on, keyed by split; empty until the model is built."""
    loss: float
    """Mean training loss of the newest segment, committed or not; 0 if not known."""
    is_idle: bool
    """True if no trained segment waits for its commit or its evaluation."""
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that were sent in the newest segment, as in SegmentFinished."""
    keeps_more: bool = False
    """True if the party depends on past state that is not in the committed state."""
    rejected: tuple[RejectedClient, ...] = ()
    """Clients rejected in closed rounds since the party began or was last given another state."""


@dataclass(frozen=True, slots=True)
class Nesting:
    """The functions that let a strategy continue from a given state: inside another strategy,
    segment by segment, and from an earlier commit of its run."""

    progress: Callable[[Any], NestedProgress]
    """(value): the progress of the party."""
    rebase: Callable[[JobSpec, Any, Base, Mapping[str, int]], Any]
    """(job, value, base, num_rows): the value after the party was given a state, as if it had just
    committed that state. num_rows: see NestedProgress, for a party that has no model yet."""
    returned: Callable[[JobSpec, Any, Base, Mapping[str, float]], Any] | None = None
    """(job, value, base, metrics): the value after the party has returned to an earlier commit of
    its own, with the commit's metrics; None: `rebase` is used. Evaluations that were owed at that
    commit stay owed."""


@dataclass(frozen=True, slots=True)
class Repeating:
    """The functions that let segments of a run be trained again while the run goes on."""

    committed: Callable[[Any], Base | None]
    """(value): the newest commit; None while there is none."""
    restored: Callable[[JobSpec, Any, Any], Any]
    """(job, value, earlier): the value of the party as it goes on from an earlier value of this
    run, which may be that of another party. Members drop what they hold and meet again."""
    digest: Callable[[Any], Digest] | None = None
    """(value): a digest of all that the segments after the newest commit follow from; None: the
    digest of the committed state."""


@dataclass(frozen=True, slots=True)
class Child:
    """A party inside a strategy, run by its own strategy; see nested.py."""

    party: Party
    job: JobSpec
    strategy: "Strategy"
    """The strategy that runs the party."""
    value: Any
    """The run value of the party's strategy."""
    horizon: int
    """The last segment that the party may train for now."""


def _none(*_: object) -> tuple[()]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """The functions that make up a strategy; those without a default are required. The methods,
    which the coordinator calls, combine them with the answers of the parties inside."""

    version: int
    """The version of this contract that the strategy was written for."""
    init: Callable[[JobSpec, Party, "Strategies"], Any]
    """(job, party, strategies): the initial run value. strategies: those available to parties
    inside this one."""
    decide: Callable[[JobSpec, Any, World, float], Fact | None]
    """(job, value, world, now_s): the next fact that follows from the present situation, if any. It
    is asked again after each fact until it answers None, so it decides one thing at a time.
    WorkerMarked and WorkerQuarantined hold in all runs, and reach the strategy in the world."""
    transition: Callable[[JobSpec, Any, Fact, float], Any]
    """(job, value, fact, now_s): the run value with one journaled fact folded in; now_s: the time
    at which the fact was journaled."""
    reject_reason: Callable[[JobSpec, Any, Fact], str]
    """(job, value, fact): the reason why a fact reported by an effect is stale or unexpected; "" if
    it is neither."""
    pending: Callable[[RunId, JobSpec, Any, int | None], frozenset[Effect]]
    """(run_id, job, value, horizon): all effects that the party needs now; no segment beyond the
    horizon is begun (None: no limit)."""
    status: Callable[[JobSpec, Any, World], Status]
    """(job, value, world): the run's status, for people."""

    check: Callable[[JobSpec, "Strategies"], list[Violation]] = lambda *_: []
    """(job, strategies): the violations of a job under this strategy; asked once, at submission."""
    own_deadline: Callable[[Any], float | None] = lambda _: None
    """(value): the leader-clock time at which to call decide in any case; None: never."""
    own_parties: Callable[[Any], Mapping[Party, PartyView]] = lambda _: {}
    """(value): the parties whose members exchange tensors with each other."""
    own_workers: Callable[[Any], Iterable[Member]] = _none
    """(value): the workers that have work of the party, besides those in own_parties."""
    num_repeats: Callable[[Any], int] = lambda _: 0
    """(value): the number of times that a verifier of the run has begun segments again. It keeps
    apart the updates of a round that is trained several times."""
    own_deaths: Callable[[Any, Member], tuple[ProcessDied, ...]] = _none
    """(value, member): deaths to count for a process that ended unasked, one per piece of work."""
    own_reform: Callable[[Any, Party, str], Fact | None] = lambda *_: None
    """(value, party, reason): the fact that gives a party a new membership after its members failed
    to exchange tensors although all of them live."""
    own_failure: Callable[[Any, PartyFailed], Fact | None] = lambda *_: None
    """(value, failed): the fact with which the run goes on after a failure of its own party; None:
    the run fails."""
    own_setback: Callable[[JobSpec, Any], str] = lambda *_: ""
    """(job, value): text that ends the reason of a membership made by own_reform: what members
    lose; "" if they go on with what they hold."""
    own_blobs: Callable[[Any], frozenset[Digest]] = lambda _: frozenset()
    """(value): the states that may still be needed, besides the run's commits."""
    children: Callable[[Any], Iterable[Child]] = _none
    """(value): the parties inside this one."""
    working: Callable[[Any], Iterable[Child]] | None = None
    """(value): the children that have work now, against which alone deaths count; None: all."""
    nesting: Nesting | None = None
    """The functions of nesting; None: neither inside another strategy nor from earlier commits."""
    repeating: Repeating | None = None
    """The functions of a verification while the run trains; None: it is not possible."""

    def _working(self, value: Any) -> Iterable[Child]:
        return (self.working or self.children)(value)

    def next_deadline(self, value: Any) -> float | None:
        """Return the earliest deadline of the party and of the parties that work inside it."""
        inside = (child.strategy.next_deadline(child.value) for child in self._working(value))
        deadlines = (self.own_deadline(value), *inside)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def parties(self, value: Any) -> Mapping[Party, PartyView]:
        """Return the parties whose members exchange tensors: this one and those below."""
        parties = dict(self.own_parties(value))
        for child in self.children(value):
            parties.update(child.strategy.parties(child.value))
        return parties

    def workers(self, value: Any) -> frozenset[Member]:
        """Return the workers that have work of this party or of those below."""
        views = self.own_parties(value).values()
        inside = (child.strategy.workers(child.value) for child in self.children(value))
        return frozenset(self.own_workers(value)).union(*(view.members for view in views), *inside)

    def deaths_to_charge(self, value: Any, member: Member) -> tuple[ProcessDied, ...]:
        """Return the deaths to count, in this party and those below, for a worker whose process
        ended although nobody asked it to: one death for each piece of the process's work."""
        inside = (
            death
            for child in self._working(value)
            for death in child.strategy.deaths_to_charge(child.value, member)
        )
        return (*self.own_deaths(value, member), *inside)

    def reform(self, job: JobSpec, value: Any, party: Party, reason: str) -> Fact | None:
        """Return the fact that forms this party, or one below, anew after a failed exchange."""
        for child in self.children(value):
            if is_within(party, child.party):
                return child.strategy.reform(child.job, child.value, party, reason)
        return self.own_reform(value, party, reason + self.own_setback(job, value))

    def party_job(self, job: JobSpec, value: Any, party: Party) -> JobSpec:
        """Return the job that this party, or one below, trains."""
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
"""The entry-point group in which packages register strategies."""

SILOS = "FederatedSilos"
REGIONAL = "FederatedRegions"
EVALUATION = "Evaluation"
SCHEDULED = "Scheduled"
VERIFIED = "Verified"


@dataclass(frozen=True, slots=True)
class Strategies:
    """The strategies that jobs can have on this coordinator, keyed by name."""

    built_in: Mapping[str, Strategy]
    """Built-in strategies. Each needs a section of its own type, so Custom cannot name one."""
    installed: Mapping[str, Strategy] = field(default_factory=dict)
    """Strategies of other packages, which Custom jobs name."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """The reason why a registered strategy cannot be used, keyed by name."""

    def of(self, job: JobSpec) -> Strategy:
        """Return the strategy that runs a job, or the stand-in MISSING if it is not installed (any
        more)."""
        return self._find(job) or MISSING

    def require(self, job: JobSpec) -> Strategy:
        """Return the strategy that runs a job. Raises InvalidInputError if it is not installed."""
        strategy = self._find(job)
        if strategy is None:
            field = "coordinator" if isinstance(job.strategy, Custom) else "type"
            raise InvalidInputError.at(f"strategy.{field}", self.why_not(job))
        return strategy

    def _find(self, job: JobSpec) -> Strategy | None:
        is_inside = job.verification is not None or _is_evaluated_in_shares(job)
        is_custom = isinstance(job.strategy, Custom) and not is_inside
        return (self.installed if is_custom else self.built_in).get(_name_of(job))

    def why_not(self, job: JobSpec) -> str:
        """Return a sentence that says why there is no implementation of a job's strategy."""
        name = _name_of(job)
        if isinstance(job.strategy, Custom) and name in self.built_in:
            return f"{name!r} is built in and reads no config; write its own type"
        if name in self.broken:
            return self.broken[name]
        packages = sorted(self.installed)
        names = ", ".join(packages) or f"none (entry-point group {GROUP})"
        hint = suggest(name, packages)
        return f"{name!r} has no implementation here; registered are {names}{hint}"


def _name_of(job: JobSpec) -> str:
    """Return the name under which a job's strategy is registered; for Custom, the name that the job
    gives.

    Some jobs have implementations of their own: federations whose clients are parties or
    federations, jobs that are verified, jobs whose hyperparameters change by step, and jobs
    that train nothing.
    """
    if _is_evaluated_in_shares(job):
        return EVALUATION
    if job.verification is not None:
        return VERIFIED
    if job.hyperparameter_schedule is not None:
        return SCHEDULED
    strategy = job.strategy
    if isinstance(strategy, Federated) and isinstance(strategy.options.inner, Federated):
        return REGIONAL
    if isinstance(strategy, Federated) and strategy.options.inner not in (None, Local()):
        return SILOS
    return str(getattr(strategy, "coordinator", type(strategy).__name__))


def _is_evaluated_in_shares(job: JobSpec) -> bool:
    """Return True if members evaluate disjoint shares of the batches. If the model is split over
    members, all of them evaluate all batches instead, as a segment without steps."""
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
"""The stand-in for a strategy whose package is no longer installed: its runs fail with the reason,
which is their run value, and can be resumed once the package is back."""

"""Define the run value of a run that is verified while it trains, and fold facts into it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from stratagem.common.base.ids import Party, WorkerId
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec, VerificationSpec
from stratagem.common.numerics.verification import VERIFIER, Conclusion, share_of
from stratagem.common.strategy import (
    ByCapability,
    DataParallel,
    Federated,
    ModelParallel,
    PopulationBased,
    Strategy,
    Tag,
)
from stratagem.coordinator.core.courses import needs_its_journal
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import (
    ROOT,
    ClientsAssigned,
    CommitUploaded,
    Fact,
    GenerationClosed,
    Member,
    MembersFormed,
    ModelBuilt,
    PartyFailed,
    PopulationFormed,
    RosterFormed,
    RunCancelled,
    RunCompleted,
    RunFailed,
    RunReleased,
    RunResumed,
    SegmentCommitted,
    SegmentFinished,
    SegmentRefuted,
    SegmentVerified,
    UpdateReceived,
)
from stratagem.coordinator.core.strategy_contract import (
    Child,
    Strategies,
)
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.verdict import (
    Blame,
    Check,
    Execution,
    Point,
    Workers,
    reason_of,
)

MAX_WAITING = 2
"""The most checks that wait behind the one under way; a further one displaces the oldest."""


@dataclass(frozen=True, slots=True)
class SegmentCounts:
    """The numbers of chosen segments by their outcome."""

    verified: int = 0
    refuted: int = 0
    missed: int = 0
    """Those that nobody has verified, or will."""

    def __str__(self) -> str:
        text = f"{counted(self.verified, 'chosen segment')} verified"
        if self.missed:
            chosen = counted(self.verified + self.missed, "chosen segment")
            text = f"{self.verified} of {chosen} verified"
        return f"{text}, {self.refuted} refuted" if self.refuted else text


@dataclass(frozen=True, slots=True)
class Setbacks:
    """The faults for which nobody was found guilty; they limit how often the run returns."""

    num_ties: int = 0
    """The times in succession that replicas differed without a majority."""
    retried: Base | None = None
    """The state from which the run goes on once more after a failure."""
    unexplained: Base | None = None
    """The newest state that was refuted although all members compute the right one alone."""
    avoided: Workers = frozenset()
    """Members that were wrong twice when they were together, and never alone: if others can, they
    train the run."""
    refuted: tuple[int, int] = (0, 0)
    """The newest refuted segment, and how often it was in succession with nobody quarantined."""


@dataclass(frozen=True, slots=True)
class VerifiedRun:
    """The run value: the party that trains, the verifier, and what is to be verified."""

    main: Child
    verifier: Child
    latest: Point | None = None
    """The newest commit that the verifier makes, too: one of which workers never had parts alone,
    or the one with which the run went on."""
    since: Workers = frozenset()
    """The workers that have been members since the newest trained segment."""
    trained: Mapping[int, Workers] = field(default_factory=dict)
    """The workers that trained each segment that has no whole commit yet."""
    is_timed: bool = False
    """True if timing or a machine has influenced the segment after the newest commit, so that no
    other execution can be equal."""
    fingerprint: str = ""
    """The numerics of the run's members."""
    checks: tuple[Check, ...] = ()
    """The checks in order of their segments; the verifier executes the first one."""
    verifiers: Workers = frozenset()
    """The workers that have computed a part of this execution."""
    num_repeats: int = 0
    """The number of executions of the verifier that have begun or ended."""
    held: frozenset[Member] = frozenset()
    """All that have been members of the run or its verifier: this run is a part of their load."""
    verified: SegmentVerified | None = None
    """A segment that was verified, until the fact that says so is journaled."""
    return_to: Point | None = None
    """The commit to which the run has to return, as a later state was refuted."""
    blame: Blame | None = None
    """The members whose replicas differed from those of the others, until the run has returned."""
    setbacks: Setbacks = field(default_factory=Setbacks)
    is_off: bool = False
    """True once the job has shown that it does not repeat itself."""
    counts: SegmentCounts = field(default_factory=SegmentCounts)


def spec_of(job: JobSpec) -> VerificationSpec:
    assert job.verification is not None
    return job.verification


def trained_job(job: JobSpec) -> JobSpec:
    """Return the job that the run's own party trains."""
    return job.model_copy(update={"verification": None})


def _verifier_job(job: JobSpec) -> JobSpec:
    """Return the verifier's job, which one worker, and any, can train: the bits depend neither on
    their number nor on the division of the stages."""
    return job.model_copy(update={"verification": None, "strategy": _on_one(job.strategy)})


def _on_one(strategy: Strategy) -> Strategy:
    """Return the strategy with what one worker of the verifier can train, at each level."""
    match strategy:
        case DataParallel(options=options):
            inner = _inside(options.inner)
            return replace(strategy, options=replace(options, min_replicas=1, inner=inner))
        case Federated(options=options):
            return replace(strategy, options=replace(options, inner=_inside(options.inner)))
        case PopulationBased(options=population):
            return replace(strategy, options=replace(population, inner=_inside(population.inner)))
        case ModelParallel(partitions=stages):
            anywhere = tuple(replace(stage, target=Tag(VERIFIER)) for stage in stages)
            return replace(strategy, partitions=anywhere)
        case _:
            return strategy


def _inside(inner: Strategy | None) -> Strategy | None:
    return None if inner is None else _on_one(inner)


def needed_tags(strategy: Strategy | None) -> tuple[str, ...]:
    """Return the tags that a worker needs to train the clients of a federation."""
    match strategy:
        case Federated(client_selection=ByCapability(required_tags=tags), options=options):
            return (*tags, *needed_tags(options.inner))
        case Federated(options=options) | PopulationBased(options=options):
            return needed_tags(options.inner)
        case _:
            return ()


def begin(job: JobSpec, party: Party, strategies: Strategies) -> VerifiedRun:
    """Return the run value before any fact."""
    return VerifiedRun(
        nested.begin(party, trained_job(job), 0, strategies),
        nested.begin(VERIFIER, _verifier_job(job), 0, strategies),
    )


# ---- Folds ----


def transition(job: JobSpec, value: VerifiedRun, fact: Fact, now_s: float) -> VerifiedRun:
    """Return the run with a fact folded in."""
    match fact:
        case SegmentVerified():
            counts = replace(value.counts, verified=value.counts.verified + 1)
            return replace(value, verified=None, counts=counts)
        case SegmentRefuted():
            is_refuted = fact.conclusion is Conclusion.RUN
            counts = replace(value.counts, refuted=value.counts.refuted + is_refuted)
            return _after_verdict(replace(value, counts=counts), fact, now_s)
        case RunCancelled() | RunFailed() | RunCompleted():
            main = nested.transition(value.main, fact, now_s)
            return missed(replace(value, main=main, checks=()), *value.checks)
        case RunReleased():
            return replace(value, held=frozenset())
        case RunResumed():
            main = nested.transition(value.main, fact, now_s)
            verifier = nested.transition(value.verifier, fact, now_s)
            value = replace(value, main=main, verifier=verifier)
            return trusting(replace(value, setbacks=_retrying(value, fact)))
        case _ if nested.is_of(value.verifier, fact):
            return _of_verifier(value, fact, now_s)
        case _:
            value = replace(value, main=nested.transition(value.main, fact, now_s))
            return _of_main(job, value, fact, now_s)


def missed(value: VerifiedRun, *checks: Check) -> VerifiedRun:
    """Return the run with the segments of these checks counted as not verified."""
    num_missed = value.counts.missed + sum(len(check.points) for check in checks)
    return replace(value, counts=replace(value.counts, missed=num_missed))


def _retrying(value: VerifiedRun, fact: RunResumed) -> Setbacks:
    """Return the setbacks after a return: if the same members have failed twice from the same
    state, others shall train the run."""
    if not fact.reason:
        return replace(value.setbacks, retried=None)
    base = nested.committed(value.main)
    if base != value.setbacks.retried or value.latest is None:
        return replace(value.setbacks, retried=base)
    return replace(value.setbacks, avoided=value.since)


def trusting(value: VerifiedRun) -> VerifiedRun:
    """Return the run that goes on from its newest commit, of which nothing is known yet."""
    base, latest = nested.committed(value.main), value.latest
    if latest is None or latest.base != base:
        latest = None if base is None else _point(value, base, frozenset())
    since = nested.workers(value.main)
    if isinstance(value.main.job.strategy, Federated | PopulationBased):
        since |= value.since  # what these have trained of an open round or generation stays
    value = replace(value, latest=latest, since=since, trained={}, verified=None)
    if (
        latest is not None
        and value.return_to is not None
        and value.return_to.segment < latest.segment
    ):
        return value  # it was stopped before its return, which follows
    return replace(value, return_to=None, blame=None)


def _of_main(job: JobSpec, value: VerifiedRun, fact: Fact, now_s: float) -> VerifiedRun:
    """Return the run after a fact of its own party, or of one below, which that has folded in."""
    value = replace(value, is_timed=value.is_timed or needs_its_journal(fact))
    match fact:
        case MembersFormed() | ClientsAssigned():
            formed = frozenset(_members_in(fact))
            names = {member.worker_id for member in formed}
            value = replace(value, since=value.since | names, held=value.held | formed)
            numerics = fact.fingerprint if isinstance(fact, MembersFormed) else ""
            return replace(value, fingerprint=numerics or value.fingerprint)
        case ModelBuilt() | PopulationFormed() | RosterFormed():
            return _begun_from(value, fact, now_s)
        case _ if getattr(fact, "party", None) != value.main.party:
            return value
        case SegmentFinished():
            members = nested.workers(value.main)
            trained = {**value.trained, fact.segment: value.since | members}
            return replace(value, trained=trained, since=members)
        case SegmentCommitted(is_partial=False) | GenerationClosed():
            return _committed(job, value)
        case CommitUploaded() if nested.has_ended(value.main):
            return _committed(job, value)  # the verifier uploads its last commit, too
        case _:
            return value


def _members_in(fact: MembersFormed | ClientsAssigned) -> Iterable[Member]:
    if isinstance(fact, MembersFormed):
        return fact.members
    return (given.member for given in fact.assignments if given.member is not None)


def _begun_from(value: VerifiedRun, fact: Fact, now_s: float) -> VerifiedRun:
    """Return the run after something that it begins with: a model, which in a population each
    member builds, or the clients of a federation, which in a population each member has."""
    latest, main = value.latest, value.main
    if latest is None:
        return trusting(value)
    is_own = isinstance(fact, RosterFormed) and fact.party == main.party
    if latest.base.digest and not is_own:
        return value  # of a client that is a party, which begins each round anew
    begun = main.strategy.transition(main.job, latest.value, fact, now_s)
    return replace(value, latest=replace(latest, value=begun))


def _point(value: VerifiedRun, base: Base, workers: Workers) -> Point:
    return Point(base, nested.digest(value.main), value.main.value, workers)


def _committed(job: JobSpec, value: VerifiedRun) -> VerifiedRun:
    """Return the run after a whole commit, which is added to the checks if the sample has it."""
    before, base = value.latest, nested.committed(value.main)
    assert base is not None
    parts = [names for segment, names in value.trained.items() if segment <= base.segment]
    point = _point(value, base, frozenset[WorkerId]().union(*parts) if parts else value.since)
    trained = {number: names for number, names in value.trained.items() if number > base.segment}
    since = value.since if parts else nested.workers(value.main)
    setbacks, is_timed = replace(value.setbacks, num_ties=0), value.is_timed
    value = replace(value, latest=point, trained=trained, since=since, setbacks=setbacks)
    value = replace(value, is_timed=False)
    if value.is_off or before is None or share_of(job.seed, point.segment) >= spec_of(job).sample:
        return value
    check = Check(replace(before, workers=frozenset()), (point,))
    if is_timed:
        return missed(value, check)
    last = value.checks[-1] if value.checks else None
    if last is not None and _continues(last, before, point):
        longer = replace(last, points=(*last.points, point))
        return _aimed(replace(value, checks=(*value.checks[:-1], longer)))
    return _added(value, check)


def _continues(check: Check, before: Point, point: Point) -> bool:
    """Return True if the check may go on to this state: whoever can verify its states so far can
    verify this one."""
    last = check.points[-1]
    return not check.executions and last.base == before.base and last.workers == point.workers


def _added(value: VerifiedRun, check: Check) -> VerifiedRun:
    """Return the run with one more check; if too many wait, the oldest that nobody executes is
    dropped."""
    first, *others = (*value.checks, check)
    if len(others) <= MAX_WAITING:
        added = replace(value, checks=(first, *others))
        return added if value.checks else _begun(added)
    return missed(replace(value, checks=(first, *others[1:])), others[0])


def _begun(value: VerifiedRun) -> VerifiedRun:
    """Return the run with the verifier set to the base of the first check, unless it has just
    reached that state itself."""
    if not value.checks:
        return value
    check, verifier = value.checks[0], value.verifier
    at = nested.committed(verifier)
    has_reached = at is not None and at.segment == check.base.segment
    if check.executions or not has_reached or nested.digest(verifier) != check.base.digest:
        # It has no members, so nothing is due on workers that must not execute this.
        verifier = nested.restored(verifier, check.base.value)
        value = replace(value, verifier=verifier, num_repeats=value.num_repeats + 1)
    return _aimed(replace(value, verifiers=nested.workers(verifier)))


def _aimed(value: VerifiedRun) -> VerifiedRun:
    """Return the run whose verifier trains as far as the first check needs it."""
    check = value.checks[0]
    last = check.points[0] if check.executions else check.points[-1]
    return replace(value, verifier=replace(value.verifier, horizon=last.segment))


def _of_verifier(value: VerifiedRun, fact: Fact, now_s: float) -> VerifiedRun:
    if isinstance(fact, PartyFailed) and fact.party == value.verifier.party:
        return _given_up(value)
    before = nested.workers(value.verifier)
    value = replace(value, verifier=nested.transition(value.verifier, fact, now_s))
    match fact:
        case MembersFormed() | ClientsAssigned():
            return replace(value, held=value.held.union(_members_in(fact)))
        case SegmentFinished() | UpdateReceived():
            return replace(value, verifiers=value.verifiers | before)
        case SegmentCommitted(is_partial=False) | CommitUploaded() | GenerationClosed():
            at, points = nested.committed(value.verifier), value.checks[0].points
            numbers = [point.segment for point in points]
            is_due = fact.party == value.verifier.party and at is not None and at.segment in numbers
            return _compared(value, at.segment, now_s) if at is not None and is_due else value
        case _:
            return value


def _given_up(value: VerifiedRun) -> VerifiedRun:
    """Return the run without the check under way, which cannot be executed; a state that has
    differed is not forgotten."""
    value = replace(value, verifier=nested.again(value.verifier))
    first, *others = value.checks
    if first.executions:
        return replace(value, checks=(replace(first, is_given_up=True), *others))
    return _begun(missed(replace(value, checks=tuple(others)), first))


def _compared(value: VerifiedRun, segment: int, now_s: float) -> VerifiedRun:
    """Return the run after the verifier has reached a state that the check compares."""
    check, *others = value.checks
    point, digest = check.points[0], nested.digest(value.verifier)
    value = replace(value, num_repeats=value.num_repeats + 1)
    if check.executions or digest != point.digest:
        execution = Execution(digest, value.verifiers)
        differed_s = check.differed_s if check.executions else now_s
        executions = (*check.executions, execution)
        check = replace(check, executions=executions, differed_s=differed_s)
        return _begun(replace(value, checks=(check, *others)))
    names, base = tuple(sorted(value.verifiers)), point.base
    verified = SegmentVerified(
        party=ROOT, segment=segment, step=base.step, digest=base.digest, workers=names
    )
    # Who is there may have trained the next segment already.
    value = replace(value, verified=verified, verifiers=nested.workers(value.verifier))
    if check.points[1:]:
        return replace(value, checks=(replace(check, base=point, points=check.points[1:]), *others))
    return _begun(replace(value, checks=tuple(others)))


def _after_verdict(value: VerifiedRun, fact: SegmentRefuted, now_s: float) -> VerifiedRun:
    setbacks = value.setbacks
    if not fact.digests:  # of replicas that differ; what was committed before is still checked
        blame = Blame(frozenset(), frozenset(fact.marked), now_s, reason_of(fact.segment))
        setbacks = replace(setbacks, num_ties=0 if fact.marked else setbacks.num_ties + 1)
        if setbacks.num_ties > 1:
            setbacks = replace(setbacks, avoided=frozenset(fact.workers[0]))
        return replace(value, return_to=value.latest, blame=blame, setbacks=setbacks)
    check, *others = value.checks
    match fact.conclusion:
        case Conclusion.RUN:
            setbacks = _refuted(setbacks, check, is_explained=bool(fact.quarantined))
            return replace(value, checks=(), return_to=check.base, setbacks=setbacks)
        case Conclusion.VERIFIER if check.points[1:]:
            rest = Check(check.points[0], check.points[1:])
            return _begun(replace(value, checks=(rest, *others)))
        case Conclusion.VERIFIER:
            return _begun(replace(value, checks=tuple(others)))
        case _:
            return missed(replace(value, checks=(), is_off=True), *value.checks)


def _refuted(setbacks: Setbacks, check: Check, *, is_explained: bool) -> Setbacks:
    """Return the setbacks after a state of the run was refuted; is_explained: somebody was
    quarantined for it."""
    point, earlier, (segment, times) = check.points[0], setbacks.unexplained, setbacks.refuted
    times = 0 if is_explained else times + 1 if segment == point.segment else 1
    unexplained = point.base if check.are_cleared else None
    is_again = unexplained is not None and earlier is not None and earlier.segment == point.segment
    avoided = point.workers if is_again else setbacks.avoided
    refuted = (point.segment, times)
    return replace(setbacks, unexplained=unexplained, avoided=avoided, refuted=refuted)

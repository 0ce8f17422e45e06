"""Define the run value of a run that is verified while it trains, and fold facts into it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stratagem.common.base.ids import Party, WorkerId
from stratagem.common.job import JobSpec, VerificationSpec
from stratagem.common.numerics.verification import VERIFIER, Conclusion, share_of
from stratagem.common.strategy import DataParallel, ModelParallel, Tag
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import (
    ROOT,
    CommitUploaded,
    Fact,
    Member,
    MembersFormed,
    ModelBuilt,
    PartyFailed,
    RunCancelled,
    RunCompleted,
    RunFailed,
    RunReleased,
    RunResumed,
    SegmentCommitted,
    SegmentFinished,
    SegmentRefuted,
    SegmentVerified,
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
    fingerprint: str = ""
    """The numerics of the run's members."""
    checks: tuple[Check, ...] = ()
    """The checks in order of their segments; the verifier executes the first one."""
    verifiers: Workers = frozenset()
    """The workers that have been members of the verifier since this execution began."""
    held: frozenset[Member] = frozenset()
    """All that have been members of the run or its verifier: this run is a part of their load."""
    verified: SegmentVerified | None = None
    """A segment that was verified, until the fact that says so is journaled."""
    return_to: Point | None = None
    """The commit to which the run has to return, as a later state was refuted."""
    blame: Blame | None = None
    """The members whose replicas differed from those of the others, until the run has returned."""
    num_ties: int = 0
    """The times in succession that replicas differed without a majority."""
    retried: Base | None = None
    """The state from which the run goes on once more after a failure; a second one ends it."""
    is_off: bool = False
    """True once the job has shown that it does not repeat itself."""
    unexplained: Base | None = None
    """The newest state that was refuted although all members compute the right one alone."""
    avoided: Workers = frozenset()
    """Members that were wrong twice when they were together, and never alone: if others can, they
    train the run."""
    refuted: tuple[int, int] = (0, 0)
    """The newest refuted segment, and how often it was in succession with nobody quarantined."""
    num_verified: int = 0
    num_refuted: int = 0
    num_missed: int = 0
    """The chosen segments that nobody has verified, or will."""


def spec_of(job: JobSpec) -> VerificationSpec:
    assert job.verification is not None
    return job.verification


def trained_job(job: JobSpec) -> JobSpec:
    """Return the job that the run's own party trains."""
    return job.model_copy(update={"verification": None})


def _verifier_job(job: JobSpec) -> JobSpec:
    """Return the verifier's job, which one worker, and any, can train: the bits depend neither on
    their number nor on the division of the stages."""
    strategy = job.strategy
    if isinstance(strategy, DataParallel):
        options, inner = strategy.options, strategy.options.inner
        inner = _untargeted(inner) if isinstance(inner, ModelParallel) else inner
        strategy = replace(strategy, options=replace(options, min_replicas=1, inner=inner))
    elif isinstance(strategy, ModelParallel):
        strategy = _untargeted(strategy)
    return job.model_copy(update={"verification": None, "strategy": strategy})


def _untargeted(strategy: ModelParallel) -> ModelParallel:
    """Return the strategy with stages for a tag that every worker of the verifier is given."""
    partitions = (replace(stage, target=Tag(VERIFIER)) for stage in strategy.partitions)
    return replace(strategy, partitions=tuple(partitions))


def begin(job: JobSpec, party: Party, strategies: Strategies) -> VerifiedRun:
    """Return the run value before any fact."""
    return VerifiedRun(
        nested.begin(party, trained_job(job), 0, strategies),
        nested.begin(VERIFIER, _verifier_job(job), 0, strategies),
    )


def names_of(child: Child) -> Workers:
    """Return the names of all workers that a party has."""
    views = child.strategy.parties(child.value).values()
    return frozenset(member.worker_id for view in views for member in view.members)


# ---- Folds ----


def transition(job: JobSpec, value: VerifiedRun, fact: Fact, now_s: float) -> VerifiedRun:
    """Return the run with a fact folded in."""
    match fact:
        case SegmentVerified():
            return replace(value, verified=None, num_verified=value.num_verified + 1)
        case SegmentRefuted():
            is_refuted = fact.conclusion is Conclusion.RUN
            value = replace(value, num_refuted=value.num_refuted + is_refuted)
            return _after_verdict(value, fact, now_s)
        case RunCancelled() | RunFailed() | RunCompleted():
            main = nested.transition(value.main, fact, now_s)
            return missed(replace(value, main=main, checks=()), *value.checks)
        case RunReleased():
            return replace(value, held=frozenset())
        case RunResumed():
            main = nested.transition(value.main, fact, now_s)
            verifier = nested.transition(value.verifier, fact, now_s)
            retried = nested.progress(main).committed if fact.reason else None
            return trusting(replace(value, main=main, verifier=verifier, retried=retried))
        case _ if nested.is_of(value.verifier, fact):
            return _of_verifier(value, fact, now_s)
        case _:
            value = replace(value, main=nested.transition(value.main, fact, now_s))
            return _of_main(job, value, fact)


def missed(value: VerifiedRun, *checks: Check) -> VerifiedRun:
    """Return the run with the segments of these checks counted as not verified."""
    num_missed = sum(len(check.points) for check in checks)
    return replace(value, num_missed=value.num_missed + num_missed)


def trusting(value: VerifiedRun) -> VerifiedRun:
    """Return the run that goes on from its newest commit, of which nothing is known yet."""
    progress = nested.progress(value.main)
    latest = None if progress.committed is None else Point(progress.committed, progress.metrics)
    since = names_of(value.main)
    value = replace(value, latest=latest, since=since, trained={}, verified=None)
    if (
        latest is not None
        and value.return_to is not None
        and value.return_to.segment < latest.segment
    ):
        return value  # it was stopped before its return, which follows
    return replace(value, return_to=None, blame=None)


def _of_main(job: JobSpec, value: VerifiedRun, fact: Fact) -> VerifiedRun:
    """Return the run after a fact of its own party, which that party has folded in."""
    match fact:
        case MembersFormed():
            names = {member.worker_id for member in fact.members}
            value = replace(value, since=value.since | names, held=value.held.union(fact.members))
            return replace(value, fingerprint=fact.fingerprint)
        case ModelBuilt():
            built = fact.model_copy(update={"party": VERIFIER})
            verifier = nested.transition(value.verifier, built, 0.0)
            return replace(trusting(value), verifier=verifier)
        case SegmentFinished():
            members = names_of(value.main)
            trained = {**value.trained, fact.segment: value.since | members}
            return replace(value, trained=trained, since=members)
        case SegmentCommitted(is_partial=False):
            return _committed(job, value)
        case CommitUploaded() if nested.has_ended(value.main):
            return _committed(job, value)  # the verifier uploads its last commit, too
        case _:
            return value


def _point(value: VerifiedRun) -> Point:
    progress = nested.progress(value.main)
    assert progress.committed is not None
    number = progress.committed.segment
    computed = (names for segment, names in value.trained.items() if segment <= number)
    workers = frozenset[WorkerId]().union(*computed)
    return Point(progress.committed, progress.metrics, workers)


def _committed(job: JobSpec, value: VerifiedRun) -> VerifiedRun:
    """Return the run after a whole commit, which is added to the checks if the sample has it."""
    before, point = value.latest, _point(value)
    trained = {number: names for number, names in value.trained.items() if number > point.segment}
    value = replace(value, latest=point, trained=trained, num_ties=0)
    if value.is_off or before is None or share_of(job.seed, point.segment) >= spec_of(job).sample:
        return value
    last = value.checks[-1] if value.checks else None
    if last is not None and _continues(last, before, point):
        longer = replace(last, points=(*last.points, point))
        return _aimed(replace(value, checks=(*value.checks[:-1], longer)))
    return _added(value, Check(replace(before, workers=frozenset()), (point,)))


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
    check = value.checks[0]
    if check.executions or nested.progress(value.verifier).committed != check.base.base:
        verifier = nested.returned(value.verifier, check.base.base, check.base.metrics)
        # Without members nothing is due on workers that must not execute this.
        value = replace(value, verifier=nested.again(verifier))
    present = names_of(value.verifier)
    return _aimed(replace(value, verifiers=present))


def _aimed(value: VerifiedRun) -> VerifiedRun:
    """Return the run whose verifier trains as far as the first check needs it."""
    check = value.checks[0]
    last = check.points[0] if check.executions else check.points[-1]
    return replace(value, verifier=replace(value.verifier, horizon=last.segment))


def _of_verifier(value: VerifiedRun, fact: Fact, now_s: float) -> VerifiedRun:
    if isinstance(fact, PartyFailed):
        return _given_up(value)
    before = names_of(value.verifier)
    value = replace(value, verifier=nested.transition(value.verifier, fact, now_s))
    match fact:
        case MembersFormed():
            value = replace(value, held=value.held.union(fact.members))
            return replace(value, verifiers=_verifiers(value, fact, before))
        case SegmentCommitted() | CommitUploaded():
            numbers = [point.segment for point in value.checks[0].points]
            is_whole = isinstance(fact, CommitUploaded) or not fact.is_partial
            return _compared(value, fact, now_s) if is_whole and fact.segment in numbers else value
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


def _verifiers(value: VerifiedRun, formed: MembersFormed, before: Workers) -> Workers:
    """Return the workers that have a part in this execution: the new members alone if they begin it
    anew, with nothing of what those before them have computed."""
    names = frozenset(member.worker_id for member in formed.members)
    is_begun = nested.progress(value.verifier).committed != value.checks[0].base.base
    return value.verifiers | names if is_begun or names & before else names


def _compared(
    value: VerifiedRun, fact: SegmentCommitted | CommitUploaded, now_s: float
) -> VerifiedRun:
    """Return the run after the verifier has reached a state that the check compares."""
    check, *others = value.checks
    point = check.points[0]
    if check.executions or fact.digest != point.base.digest:
        execution = Execution(fact.digest, value.verifiers)
        differed_s = check.differed_s if check.executions else now_s
        executions = (*check.executions, execution)
        check = replace(check, executions=executions, differed_s=differed_s)
        return _begun(replace(value, checks=(check, *others)))
    names = tuple(sorted(value.verifiers))
    verified = SegmentVerified(
        party=ROOT, segment=fact.segment, step=point.base.step, digest=fact.digest, workers=names
    )
    value = replace(value, verified=verified)
    if check.points[1:]:
        return replace(value, checks=(replace(check, base=point, points=check.points[1:]), *others))
    return _begun(replace(value, checks=tuple(others)))


def _after_verdict(value: VerifiedRun, fact: SegmentRefuted, now_s: float) -> VerifiedRun:
    if not fact.digests:  # of replicas that differ; what was committed before is still checked
        blame = Blame(frozenset(), frozenset(fact.marked), now_s, reason_of(fact.segment))
        num_ties = 0 if fact.marked else value.num_ties + 1
        if num_ties > 1:
            value = replace(value, avoided=frozenset(fact.workers[0]))
        return replace(value, return_to=value.latest, blame=blame, num_ties=num_ties)
    check, *others = value.checks
    match fact.conclusion:
        case Conclusion.RUN:
            point, earlier = check.points[0], value.unexplained
            times = value.refuted[1] + 1 if value.refuted[0] == point.segment else 1
            refuted = (point.segment, 0 if fact.quarantined else times)
            value = replace(value, refuted=refuted)
            unexplained = point.base if check.are_cleared else None
            if unexplained is not None and earlier is not None and earlier.segment == point.segment:
                value = replace(value, avoided=point.workers)
            return replace(value, checks=(), return_to=check.base, unexplained=unexplained)
        case Conclusion.VERIFIER if check.points[1:]:
            rest = Check(check.points[0], check.points[1:])
            return _begun(replace(value, checks=(rest, *others)))
        case Conclusion.VERIFIER:
            return _begun(replace(value, checks=tuple(others)))
        case _:
            return missed(replace(value, checks=(), is_off=True), *value.checks)

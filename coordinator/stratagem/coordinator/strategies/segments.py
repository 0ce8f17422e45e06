"""The life of a party that trains synchronously, shared by the strategies that do.

Members are formed, one of them builds the model, and then segment after segment is trained by all
members together and committed while the next one already runs. When a member is lost the survivors
go on inside the open segment, from the newest state that any of them holds; when all are lost the
party returns to its last commit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stratagem.common.ids import Digest, Party, RunId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import Base, Build, CommitSegment, Effect, RunSegment
from stratagem.coordinator.core.facts import (
    Fact,
    Member,
    MembersFormed,
    ModelBuilt,
    ProcessDied,
    RunCompleted,
    RunFailed,
    RunResumed,
    SegmentCommitted,
    SegmentFinished,
)
from stratagem.coordinator.core.state import RunPhase, World
from stratagem.coordinator.strategies.contract import Outlook, PartyView, Standing
from stratagem.coordinator.strategies.placement import eligible, why_none
from stratagem.coordinator.strategies.schedule import TRAIN_SPLIT, Schedule, schedule_of

MAX_PROCESS_DEATHS = 3
"""A segment that ends this many worker processes fails its run: it would go on for ever."""

MAX_UNCOMMITTED = 2
"""Finished segments whose snapshots may wait for their commit; bounds the workers' memory."""


@dataclass(frozen=True, slots=True)
class Finished:
    segment: int
    step: int
    metrics: Mapping[str, float]
    sources: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class PartyRun:
    """Members of one synchronous party and how far they have come."""

    party: Party
    membership: int = 0
    members: tuple[Member, ...] = ()
    fingerprint: str = ""
    num_rows: Mapping[str, int] = field(default_factory=dict)
    committed: Base | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the committed segment."""
    lineage: int = 0
    """How often the party has begun from a given state."""
    open_segment: int = 0
    """The segment being trained; 0 until the model is built."""
    finished: tuple[Finished, ...] = ()
    """Trained by all members and not yet committed, in order."""
    left: frozenset[Member] = frozenset()
    """Members that were lost inside the open segment."""
    num_deaths: int = 0
    """Worker processes that have ended inside the open segment."""
    is_recovering: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """What tells one synchronous strategy from another."""

    num_shards: int
    min_members: int
    by_parameter_server: bool = False


def decide(job: JobSpec, run: PartyRun, shape: Shape, world: World) -> Fact | None:
    """The next fact: a death too many, the end, or other members."""
    if run.num_deaths >= MAX_PROCESS_DEATHS:
        return RunFailed(
            reason=f"segment {run.open_segment} has ended {run.num_deaths} worker processes"
        )
    if run.committed is not None and run.committed.segment == num_segments(job, run):
        return RunCompleted(reason=f"{run.committed.step} steps committed")
    return _reform(job, run, shape, world)


def _reform(job: JobSpec, run: PartyRun, shape: Shape, world: World) -> MembersFormed | None:
    alive = tuple(member for member in run.members if world.holds(member))
    spare = [
        worker for worker in eligible(job, world, run.fingerprint) if worker.member not in alive
    ]
    joining = tuple(worker.member for worker in spare[: shape.num_shards - len(alive)])
    members = alive + joining
    if len(members) < shape.min_members:
        members = ()
    if members == run.members:
        return None
    first = world.workers[members[0].worker_id].capability if members else None
    fingerprint = run.fingerprint or (first.numerics_fingerprint if first else "")
    return MembersFormed(
        party=run.party,
        membership=run.membership + 1,
        members=members,
        reason=_why_reformed(run.members, members, shape),
        fingerprint=fingerprint if job.execution.deterministic else "",
    )


def _why_reformed(old: tuple[Member, ...], new: tuple[Member, ...], shape: Shape) -> str:
    lost = ", ".join(str(m.worker_id) for m in old if m not in new)
    joined = ", ".join(str(m.worker_id) for m in new if m not in old)
    parts = [f"{lost} lost" if lost else "", f"{joined} joined" if joined else ""]
    count = f"{len(new)} of {shape.num_shards} workers"
    return ", ".join([*filter(None, parts), count])


def reform(run: PartyRun, party: Party, reason: str) -> MembersFormed | None:
    """The same members under a new membership, after their exchange has failed."""
    if party != run.party:
        return None
    return MembersFormed(
        party=party,
        membership=run.membership + 1,
        members=run.members,
        reason=reason,
        fingerprint=run.fingerprint,
    )


def transition(job: JobSpec, run: PartyRun, fact: Fact) -> PartyRun:
    """Fold a fact; facts of other kinds leave the party as it is."""
    match fact:
        case MembersFormed():
            return _with_members(run, fact)
        case ProcessDied():
            return replace(run, num_deaths=run.num_deaths + 1)
        case ModelBuilt():
            base = Base(0, 0, fact.digest)
            return replace(
                run,
                num_rows=fact.num_rows,
                committed=base,
                open_segment=1,
                left=frozenset(),
                num_deaths=0,
            )
        case SegmentFinished():
            done = Finished(fact.segment, fact.step, fact.metrics, run.members)
            return replace(
                run,
                finished=(*run.finished, done),
                open_segment=fact.segment + 1,
                left=frozenset(),
                num_deaths=0,
                is_recovering=False,
            )
        case SegmentCommitted():
            left = tuple(f for f in run.finished if f.segment > fact.segment)
            base = Base(fact.segment, fact.step, fact.digest)
            return replace(run, finished=left, committed=base, metrics=fact.metrics)
        case RunResumed():
            return _returned_to_commit(replace(run, members=(), left=frozenset(), num_deaths=0))
        case _:
            return run


def _with_members(run: PartyRun, fact: MembersFormed) -> PartyRun:
    survivors = set(run.members) & set(fact.members)
    # A snapshot whose every holder is gone cannot be committed any more.
    can_commit = all(survivors & set(done.sources) for done in run.finished)
    formed = replace(
        run,
        membership=fact.membership,
        members=fact.members,
        fingerprint=fact.fingerprint,
        is_recovering=run.open_segment > 0,
        why=fact.reason,
        left=run.left | (set(run.members) - set(fact.members)),
    )
    return formed if survivors and can_commit else _returned_to_commit(formed)


def _returned_to_commit(run: PartyRun) -> PartyRun:
    segment = run.committed.segment + 1 if run.committed else 0
    return replace(run, open_segment=segment, finished=())


def is_welcome(run: PartyRun, fact: Fact) -> str:
    """Why a reported fact is stale; "" when it is the one waited for."""
    match fact:
        case ModelBuilt():
            return "" if run.open_segment == 0 else "the model is built already"
        case SegmentFinished():
            expected = (run.open_segment, run.membership)
            got = (fact.segment, fact.membership)
            return "" if got == expected else f"expected (segment, membership) {expected}"
        case SegmentCommitted():
            waiting = [f.segment for f in run.finished]
            first = waiting[0] if waiting else None
            return "" if fact.segment == first else f"segment {first} is to be committed next"
        case _:
            return ""


def pending(
    run_id: RunId, job: JobSpec, run: PartyRun, shape: Shape, horizon: int | None = None
) -> frozenset[Effect]:
    """The commit that is due, and the segment to train."""
    if run.committed is None:
        if not run.members:
            return frozenset()
        return frozenset({Build(run_id, run.party, run.membership, run.members[0])})
    effects: set[Effect] = set()
    if run.finished:
        done = run.finished[0]
        sources = tuple(m for m in done.sources if m in run.members)
        metrics = tuple(sorted(done.metrics.items()))
        effects.add(
            CommitSegment(
                run_id, run.party, done.segment, done.step, run.membership, sources, metrics
            )
        )
    schedule = schedule_of(job, run.num_rows[TRAIN_SPLIT])
    may_begin = horizon is None or run.open_segment <= horizon
    if run.members and may_begin and _has_open(schedule, run) and _has_room(run):
        effects.add(_segment(run_id, job, run, shape, schedule))
    return frozenset(effects)


def _has_room(run: PartyRun) -> bool:
    return len(run.finished) < MAX_UNCOMMITTED


def _has_open(schedule: Schedule, run: PartyRun) -> bool:
    return 0 < run.open_segment <= len(schedule.ends())


def _segment(
    run_id: RunId, job: JobSpec, run: PartyRun, shape: Shape, schedule: Schedule
) -> RunSegment:
    assert run.committed is not None
    to_step = schedule.ends()[run.open_segment - 1]
    evaluation = job.evaluation
    splits = (evaluation.split,) if evaluation and schedule.evaluates_at(to_step) else ()
    return RunSegment(
        run_id=run_id,
        party=run.party,
        membership=run.membership,
        segment=run.open_segment,
        to_step=to_step,
        base=run.committed,
        lineage=run.lineage,
        members=run.members,
        num_shards=shape.num_shards,
        by_parameter_server=shape.by_parameter_server,
        evaluate=splits,
    )


def num_segments(job: JobSpec, run: PartyRun) -> int:
    """Segments of the whole run; -1 while the number of rows is unknown."""
    if run.committed is None:
        return -1
    return len(schedule_of(job, run.num_rows[TRAIN_SPLIT]).ends())


# ---- what the rest of the coordinator, and a strategy around this one, ask of a party ----


def parties(run: PartyRun) -> Mapping[Party, PartyView]:
    """The party itself."""
    return {run.party: PartyView(run.membership, run.members)}


def deaths(run: PartyRun, member: Member) -> tuple[ProcessDied, ...]:
    """A member works on the open segment, or did until it was lost."""
    if member not in run.members and member not in run.left:
        return ()
    return (ProcessDied(party=run.party, member=member, segment=run.open_segment),)


def job_of(job: JobSpec, run: PartyRun, party: Party) -> JobSpec:
    """All members train the same."""
    del run, party
    return job


def blobs(run: PartyRun) -> frozenset[Digest]:
    """The state to return to."""
    return frozenset({run.committed.digest} if run.committed else ())


def standing(run: PartyRun) -> Standing:
    """The committed segment."""
    return Standing(run.committed, run.metrics, run.num_rows, is_idle=not run.finished)


def rebase(job: JobSpec, run: PartyRun, base: Base, num_rows: Mapping[str, int]) -> PartyRun:
    """The members drop what they hold and begin after the base."""
    del job
    return replace(
        run,
        num_rows=num_rows,
        committed=base,
        metrics={},
        lineage=run.lineage + 1,
        open_segment=base.segment + 1,
        finished=(),
        left=frozenset(),
        num_deaths=0,
        is_recovering=False,
    )


def outlook(job: JobSpec, run: PartyRun, shape: Shape, world: World) -> Outlook:
    """How the party stands."""
    ends: tuple[int, ...] = ()
    if run.committed is not None:
        ends = schedule_of(job, run.num_rows[TRAIN_SPLIT]).ends()
    trained = run.finished[-1] if run.finished else run.committed
    phase, strategy_phase, reason = _phase(job, run, shape, world)
    return Outlook(
        phase=phase,
        strategy_phase=strategy_phase,
        reason=reason,
        step=trained.step if trained else 0,
        num_steps=ends[-1] if ends else 0,
        segment=trained.segment if trained else 0,
        num_segments=len(ends),
        members=run.members,
    )


def _phase(job: JobSpec, run: PartyRun, shape: Shape, world: World) -> tuple[RunPhase, str, str]:
    if not run.members:
        need = f"waiting for {shape.min_members} of {shape.num_shards} workers"
        reason = f"{need}: {why_none(job, world, run.fingerprint)}"
        phase = RunPhase.RECOVERING if run.open_segment else RunPhase.PLACING
        return phase, "WAITING", reason
    if run.open_segment == 0:
        return RunPhase.RUNNING, "BUILDING", run.why
    if run.open_segment > num_segments(job, run):
        return RunPhase.RUNNING, "COMMITTING", run.why
    if run.is_recovering:
        return RunPhase.RECOVERING, "TRAINING", run.why
    return RunPhase.RUNNING, "TRAINING", run.why

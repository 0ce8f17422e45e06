"""The decisions of a synchronous party: its members, and its end."""

from collections.abc import Callable

from stratagem.common.base.ids import Party
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.crash_loops import why
from stratagem.coordinator.core.facts import (
    Fact,
    Member,
    MembersFormed,
    RunCompleted,
    RunFailed,
    SoleCopiesLost,
    StoppedEarly,
    UploadDue,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import World
from stratagem.coordinator.strategies.scheduling.placement import eligible
from stratagem.coordinator.strategies.synchronous.segments.synchronous_run import (
    PartyRun,
    Placed,
    SegmentRules,
    are_moved,
    goes_on,
    needs_upload,
    num_segments,
    stop_reason,
)


def decide(
    job: JobSpec, run: PartyRun, shape: SegmentRules, world: World, now_s: float
) -> Fact | None:
    """Return the next fact: a death too many, the end, or other members."""
    if run.deaths.are_too_many:
        reason = why(f"segment {run.open_segment}", run.deaths)
        return RunFailed(reason=reason, cause=Cause.CRASHED)
    if run.committed is not None and run.committed.segment == num_segments(job, run):
        return RunCompleted(reason=_what_was_done(job, run, run.committed.step))
    is_whole = run.committed is not None and not run.finished and not run.kept
    if run.committed is not None and is_whole and (why_now := stop_reason(job, run)):
        reason = f"stopped early after {counted(run.committed.step, 'step')}: {why_now}"
        return StoppedEarly(reason=reason, step=run.committed.step)
    return members_due(job, run, shape, world) or _copies_due(job, run, world, now_s)


def _copies_due(
    job: JobSpec, run: PartyRun, world: World, now_s: float
) -> UploadDue | SoleCopiesLost | None:
    """Return what becomes of what only workers have of the commit, where it is needed elsewhere.

    A worker that is away may come back with its files, and is waited for; one that has left may
    not. One that was asked may have sent them before: the upload finds out.
    """
    if run.committed is None or not needs_upload(job, run):
        return None
    records = [world.workers.get(kept.worker_id) for kept in run.kept]
    here = tuple(record.member for record in records if record is not None and record.is_alive)
    at = (run.party, run.committed.segment)
    if len(here) == len(run.kept):
        if here == run.holders:
            return None
        reason = f"it goes to {counted(len(run.members), 'worker')}"
        if not run.members or not are_moved(run):
            reason = "the training stops here"
        return UploadDue(party=at[0], segment=at[1], holders=here, reason=reason)
    has_left = any(record is None for record in records)
    is_late = run.awaits_until_s is not None and now_s >= run.awaits_until_s
    if run.holders or not (has_left or is_late):
        return None
    names = {member.worker_id for member in here}
    gone = ", ".join(kept.worker_id for kept in run.kept if kept.worker_id not in names)
    reason = (
        f"what only {gone} had is gone with {'it' if len(run.kept) == len(here) + 1 else 'them'}"
    )
    return SoleCopiesLost(party=at[0], segment=at[1], reason=reason)


def deadline(run: PartyRun) -> float | None:
    """Return until when workers are waited for that are away with what only they have kept."""
    return run.awaits_until_s


def _what_was_done(job: JobSpec, run: PartyRun, num_steps: int) -> str:
    if not job.only_evaluates or job.evaluation is None:
        return f"{counted(num_steps, 'step')} committed"
    split = job.evaluation.split
    return f"{run.num_rows[split]} rows of {split} evaluated"


def members_due(
    job: JobSpec, run: PartyRun, shape: SegmentRules, world: World
) -> MembersFormed | None:
    """Return other members than the present ones, if there should be."""
    placed = (shape.place or _any_workers(shape))(job, run, world)
    members = placed.members
    if members == run.members:
        return None
    first = world.workers[members[0].worker_id].capability if members else None
    fingerprint = run.fingerprint or (first.numerics_fingerprint if first else "")
    are_apart = len(members) > 1 and _are_apart(members, world)
    reason = _why_reformed(run.members, members, shape, world)
    return MembersFormed(
        party=run.party,
        membership=run.membership + 1,
        members=members,
        reason=reason + _what_follows(job, run, members, shape, are_apart=are_apart),
        fingerprint=fingerprint if job.execution.deterministic else "",
        ranks=placed.ranks,
        are_apart=are_apart,
    )


def _what_follows(
    job: JobSpec,
    run: PartyRun,
    members: tuple[Member, ...],
    shape: SegmentRules,
    *,
    are_apart: bool,
) -> str:
    """Say what becomes of what was trained, where that depends on who is left."""
    at = run.committed
    if job.only_evaluates or not run.open_segment or at is None:
        return ""
    if not members or not (run.members or run.is_recovering):
        return ""
    if goes_on(run, members, shape, are_apart=are_apart):
        is_sliced = shape.fewest_mirrored is not None
        return "; each slice of the state is left with one of them" if is_sliced else ""
    return f"; back to the last commit, segment {at.segment} at step {at.step}"


def setback(job: JobSpec, run: PartyRun, shape: SegmentRules) -> str:
    """Say what the present members lose where they meet again, as after a failed exchange."""
    if goes_on(run, run.members, shape, are_apart=run.are_apart):
        return ""
    return _what_follows(job, run, run.members, shape, are_apart=run.are_apart)


def _any_workers(shape: SegmentRules) -> Callable[[JobSpec, PartyRun, World], Placed]:
    """Return a placement that keeps the members that are left and adds any that can join, up to one
    per shard."""

    def place(job: JobSpec, run: PartyRun, world: World) -> Placed:
        alive = tuple(member for member in run.members if world.holds(member))
        members = _as_kept(run, alive + _joining(job, run, shape, world, alive))
        return Placed(members if len(members) >= shape.min_members else ())

    return place


def _as_kept(run: PartyRun, members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Return the members in the order in which they have kept replicas, where all those are back:
    then each goes on with its own."""
    places = {kept.worker_id: place for place, kept in enumerate(run.kept)}
    if {member.worker_id for member in members} != set(places):
        return members
    return tuple(sorted(members, key=lambda member: places[member.worker_id]))


def _joining(
    job: JobSpec, run: PartyRun, shape: SegmentRules, world: World, alive: tuple[Member, ...]
) -> tuple[Member, ...]:
    if len(alive) >= shape.num_shards:
        return ()
    spare = [
        worker for worker in eligible(job, world, run.fingerprint) if worker.member not in alive
    ]
    joining = tuple(worker.member for worker in spare[: shape.num_shards - len(alive)])
    returns = shape.returns(run.members) or run.are_apart or _are_apart(joining, world)
    if returns and run.finished and alive == run.members:
        # They would return the party to its last commit: let them wait until there is a new one.
        return ()
    return joining


def _are_apart(members: tuple[Member, ...], world: World) -> bool:
    """Return True when a member is reached through a tunnel, and so not by the others."""
    return any(world.workers[member.worker_id].capability.tunnelled for member in members)


def _why_reformed(
    old: tuple[Member, ...], new: tuple[Member, ...], shape: SegmentRules, world: World
) -> str:
    gone = [member for member in old if member not in new]
    by_how = {
        "lost": [m for m in gone if not _has_left(world, m) and not world.holds(m)],
        "left": [m for m in gone if _has_left(world, m)],
        "released": [m for m in gone if world.holds(m)],
        "joined": [m for m in new if m not in old],
    }
    parts = [f"{', '.join(m.worker_id for m in who)} {how}" for how, who in by_how.items() if who]
    count = f"{len(new)} workers" if shape.place else f"{len(new)} of {shape.num_shards} workers"
    return ", ".join([*parts, count])


def _has_left(world: World, member: Member) -> bool:
    """Return True when the member was asked to end, and drains or is gone."""
    record = world.workers.get(member.worker_id)
    return record is None or (record.member == member and record.is_alive and record.is_draining)


def reform(run: PartyRun, party: Party, reason: str) -> MembersFormed:
    """Return the same members under a new membership, after their exchange has failed."""
    return MembersFormed(
        party=party,
        membership=run.membership + 1,
        members=run.members,
        reason=reason,
        fingerprint=run.fingerprint,
        ranks=run.ranks,
        are_apart=run.are_apart,
    )

"""The run value of a synchronous party, and the fold of facts into it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from stratagem.common.base.ids import Digest, Party, WorkerId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.courses import (
    Deaths,
    after,
    resumed_metrics,
    why_stopped,
    with_course,
)
from stratagem.coordinator.core.effects import Base, ExchangeMethod
from stratagem.coordinator.core.facts import (
    CommitUploaded,
    Fact,
    Member,
    MembersFormed,
    ModelBuilt,
    ProcessDied,
    RunCancelled,
    RunFailed,
    RunResumed,
    SegmentCommitted,
    SegmentFinished,
    SoleCopiesLost,
    UploadDue,
)
from stratagem.coordinator.core.world import World
from stratagem.coordinator.strategies.schedule import schedule_of


class KeptFile(NamedTuple):
    """A worker's file with the parts of a commit that this worker alone has."""

    worker_id: WorkerId
    digest: Digest


@dataclass(frozen=True, slots=True)
class Finished:
    segment: int
    step: int
    metrics: Mapping[str, float]
    sources: tuple[Member, ...]
    loss: float
    """Mean training loss of the segment."""
    stop_reason: str = ""
    """Why the user's code ends the training here, "" if it does not; see SegmentFinished."""
    streams: str = ""
    """The position in each stream of rows at the end of the segment; see effects.Base."""
    kept: tuple[KeptFile, ...] = ()
    """The files with the parts that only one member has, in order of rank; see SegmentFinished."""


@dataclass(frozen=True, slots=True)
class WholeCommit:
    """The newest commit that was uploaded as a whole, with its metrics."""

    base: Base
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PartyRun:
    """The run value of a synchronous party: its members and its progress."""

    party: Party
    membership: int = 0
    members: tuple[Member, ...] = ()
    fingerprint: str = ""
    ranks: tuple[int, ...] = ()
    are_apart: bool = False
    """True if members do not reach each other; see MembersFormed, which also explains `ranks`."""
    num_rows: Mapping[str, int] = field(default_factory=dict)
    committed: Base | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the committed segment."""
    loss: float = 0.0
    """Mean training loss of the newest segment that was trained."""
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Traffic of the newest segment that was trained; see SegmentFinished."""
    lineage: int = 0
    """The number of times that the party has begun from a given state."""
    open_segment: int = 0
    """The segment being trained; 0 until the model is built."""
    finished: tuple[Finished, ...] = ()
    """The segments that all members have trained and that are not committed yet, in order."""
    left: frozenset[Member] = frozenset()
    """Members that were lost during the open segment."""
    deaths: Deaths = field(default_factory=Deaths)
    """Worker processes that have died during the open segment."""
    is_recovering: bool = False
    why: str = ""
    stop_reason: str = ""
    """The reason that the user's code gave for ending the training with the committed segment."""
    kept: tuple[KeptFile, ...] = ()
    """The files with commit parts that only workers have, by rank; empty for a whole commit."""
    whole: WholeCommit | None = None
    """The commit to return to if those files are lost; None while the commit is whole."""
    holders: tuple[Member, ...] = ()
    """The workers that were asked to upload their files of the commit."""
    awaits_until_s: float | None = None
    """The leader-clock time until which absent workers with files of the commit are waited for."""
    has_ended: bool = False
    """True from the time that the run was stopped or has failed until it is resumed."""


RETURN_S: Final = 60.0
"""Seconds to wait for an absent worker that alone has a file of a commit."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The members that a party should have; empty while too few suitable workers are present."""

    members: tuple[Member, ...]
    ranks: tuple[int, ...] = ()


Parts = tuple[tuple[Member, ...], ...]
"""The members that hold each part of a state; any one of them will do."""


def one_part(members: tuple[Member, ...], _ranks: tuple[int, ...]) -> Parts:
    """Return the division of a state that every member holds whole: one part, held by all."""
    return (members,)


def part_per_member(members: tuple[Member, ...], _ranks: tuple[int, ...]) -> Parts:
    """Return the division of a state of which each member holds a part that no other one has."""
    return tuple((member,) for member in members)


def mirrors_of(members: tuple[Member, ...]) -> Parts:
    """Return the mirror of each part: the member that follows the one that has the part."""
    return tuple((member,) for member in (*members[1:], *members[:1]))


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """The rules that distinguish one synchronous strategy from another."""

    num_shards: int
    min_members: int
    exchange: ExchangeMethod = ExchangeMethod.ALL_REDUCE
    parts_of: Callable[[tuple[Member, ...], tuple[int, ...]], Parts] = one_part
    """A function of (members by rank, ranks of the party) that returns the members that hold each
    part of the state."""
    place: Callable[[JobSpec, "PartyRun", World], Placed] | None = None
    """The placement function of the party; None: any workers will do."""
    why_missing: Callable[[JobSpec, "PartyRun", World], str] | None = None
    """A function of (job, run, world): returns a sentence about the workers that `place` awaits."""
    upload_every: int = 1
    """The number of segments from one commit that has all files of the members to the next one."""
    is_sole_copy: bool = False
    """True if parts of the state have only one copy, so that members can neither continue without a
    lost member nor repeat a failed step: any change of members, and any failed exchange, returns
    the party to its last commit."""
    fewest_mirrored: int | None = None
    """The smallest number of members with which each one mirrors the part of the previous member,
    so that a part survives while one of the two is left. None: parts are never mirrored."""

    def is_mirrored(self, members: tuple[Member, ...]) -> bool:
        """Return True if each part of the state is held by two of these members."""
        return self.fewest_mirrored is not None and len(members) >= self.fewest_mirrored

    def returns(self, members: tuple[Member, ...]) -> bool:
        """Return True if any change of these members sends the party back to its last commit."""
        return self.is_sole_copy and not self.is_mirrored(members)


def transition(
    job: JobSpec, run: PartyRun, fact: Fact, shape: SegmentRules, now_s: float
) -> PartyRun:
    """Return the party with a fact folded in; facts of other kinds do not change it."""
    match fact:
        case MembersFormed():
            return _with_members(run, fact, shape, now_s)
        case ProcessDied():
            return replace(run, deaths=after(run.deaths, fact, now_s, run.left.union(run.members)))
        case ModelBuilt():
            return replace(
                run,
                num_rows=fact.num_rows,
                committed=Base(fact.segment, fact.step, fact.digest, fact.streams),
                metrics=resumed_metrics(job),
                open_segment=1,
                left=frozenset(),
                deaths=Deaths(),
            )
        case SegmentFinished():
            metrics = with_course(job, latest_metrics(run), fact.metrics)
            done = Finished(
                fact.segment,
                fact.step,
                metrics,
                run.members,
                fact.loss,
                fact.stop_reason,
                fact.streams,
                _kept(run, fact),
            )
            return replace(
                run,
                finished=(*run.finished, done),
                loss=fact.loss,
                traffic=fact.traffic,
                open_segment=fact.segment + 1,
                left=frozenset(),
                deaths=Deaths(),
                is_recovering=False,
            )
        case SegmentCommitted():
            return _committed(run, fact)
        case UploadDue():
            return replace(run, holders=fact.holders, awaits_until_s=None)
        case CommitUploaded() if run.committed is not None:
            return _as_whole(replace(run, committed=replace(run.committed, digest=fact.digest)))
        case SoleCopiesLost():
            returned_run = _returned_to_commit(_to_whole(run))
            membership, lineage = run.membership + 1, run.lineage + 1
            return replace(returned_run, is_recovering=True, membership=membership, lineage=lineage)
        case RunCancelled() | RunFailed():
            return replace(run, has_ended=True, holders=run.holders or _holders(run))
        case RunResumed():
            # The workers have let go of the run, and of the files that they had kept of it.
            stopped = replace(_to_whole(run), members=(), left=frozenset(), deaths=Deaths())
            return _returned_to_commit(replace(stopped, is_recovering=False, has_ended=False))
        case _:
            return run


def _holders(run: PartyRun) -> tuple[Member, ...]:
    """Return the members if they themselves have the kept files of the commit; else none."""
    return () if are_moved(run) else run.members


def _kept(run: PartyRun, fact: SegmentFinished) -> tuple[KeptFile, ...]:
    """Return a record of the files that members have kept at a segment's end, by rank."""
    if not fact.kept:
        return ()
    return tuple(
        KeptFile(member.worker_id, digest)
        for member, digest in zip(run.members, fact.kept, strict=True)
    )


def _committed(run: PartyRun, fact: SegmentCommitted) -> PartyRun:
    done = next((f for f in run.finished if f.segment == fact.segment), None)
    uncommitted = tuple(f for f in run.finished if f.segment > fact.segment)
    # Of a partial commit those before it are still what there is to return to.
    whole = run.whole
    if whole is None and run.committed is not None:
        whole = WholeCommit(run.committed, run.metrics)
    after = replace(
        run,
        finished=uncommitted,
        committed=Base(fact.segment, fact.step, fact.digest, fact.streams),
        metrics=fact.metrics,
        stop_reason="" if done is None else done.stop_reason,
        holders=(),
        awaits_until_s=None,
    )
    files = () if done is None else done.kept
    return replace(after, kept=files, whole=whole) if files else _as_whole(after)


def _as_whole(run: PartyRun) -> PartyRun:
    """Return the run value with its commit marked as whole: no part of it is on workers alone."""
    return replace(run, kept=(), whole=None, holders=(), awaits_until_s=None)


def _to_whole(run: PartyRun) -> PartyRun:
    """Return the run value set back to the newest commit that was uploaded as a whole."""
    if run.whole is None:
        return run
    base, metrics = run.whole.base, run.whole.metrics
    return _as_whole(replace(run, committed=base, metrics=metrics, stop_reason=""))


def are_moved(run: PartyRun) -> bool:
    """Return True if the kept files of the commit are needed on other workers than those that have
    them, or if there are no members."""
    names = [member.worker_id for member in run.members]
    return bool(run.kept) and names != [file.worker_id for file in run.kept]


def needs_upload(job: JobSpec, run: PartyRun) -> bool:
    """Return True if parts of the commit that only workers have are needed elsewhere, or if the run
    ends here: workers then delete their files, even if the run may be resumed."""
    if run.has_ended:
        return bool(run.kept)
    is_end = bool(run.kept) and not run.finished and bool(stop_reason(job, run))
    return are_moved(run) or is_end


def _with_members(
    run: PartyRun, fact: MembersFormed, shape: SegmentRules, now_s: float
) -> PartyRun:
    formed = replace(
        run,
        membership=fact.membership,
        members=fact.members,
        fingerprint=fact.fingerprint,
        ranks=fact.ranks,
        are_apart=fact.are_apart,
        # A member that joins is no setback; a loss is, and so is an exchange that has failed.
        is_recovering=run.is_recovering or _is_setback(run, fact),
        why=fact.reason,
        left=run.left | (set(run.members) - set(fact.members)),
    )
    if not are_moved(formed):
        formed = replace(formed, holders=(), awaits_until_s=None)
    elif formed.members and formed.awaits_until_s is None and not formed.holders:
        formed = replace(formed, awaits_until_s=now_s + RETURN_S)
    if goes_on(run, fact.members, shape, are_apart=fact.are_apart):
        return formed
    # What members still hold, they hold at different steps and as parts of segments that start
    # again: it must not be continued from.
    return replace(_returned_to_commit(formed), lineage=run.lineage + bool(run.open_segment))


def goes_on(
    run: PartyRun, members: tuple[Member, ...], shape: SegmentRules, *, are_apart: bool
) -> bool:
    """Return True if these members can go on with what the present ones train; False: they begin
    from the last commit. are_apart: these members do not reach each other."""
    survivors = set(run.members) & set(members)
    # A state, or a snapshot, of which all holders of a part are gone cannot be had any more.
    held_by = [run.members, *(done.sources for done in run.finished)]
    parts = [part for held in held_by for part in _holders_of(held, run.ranks, shape)]
    is_whole = all(survivors & set(part) for part in parts)
    return is_whole and not (run.are_apart or are_apart) and not shape.returns(run.members)


def _holders_of(members: tuple[Member, ...], ranks: tuple[int, ...], shape: SegmentRules) -> Parts:
    """Return the members that hold each part of the state, those with mirrors included."""
    parts = shape.parts_of(members, ranks)
    if not shape.is_mirrored(members):
        return parts
    return tuple((*owners, *also) for owners, also in zip(parts, mirrors_of(members), strict=True))


def _is_setback(run: PartyRun, fact: MembersFormed) -> bool:
    """Return True if the new membership loses a member of the party, or unfinished work."""
    if run.open_segment == 0 or not run.members:
        return False
    return fact.members == run.members or not set(run.members) <= set(fact.members)


def _returned_to_commit(run: PartyRun) -> PartyRun:
    segment = run.committed.segment + 1 if run.committed else 0
    return replace(run, open_segment=segment, finished=())


def reject_reason(run: PartyRun, fact: Fact) -> str:
    """Return the reason why a reported fact is stale; "" if the party waits for the fact."""
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
        case SoleCopiesLost() if fact.membership is not None:
            now = run.membership
            return "" if fact.membership == now else f"the party is at membership {now}"
        case CommitUploaded() | SoleCopiesLost():
            at = run.committed.segment if run.kept and run.committed is not None else None
            return "" if fact.segment == at else "nothing of that commit is on workers alone"
        case _:
            return ""


def rebase(_job: JobSpec, run: PartyRun, base: Base, num_rows: Mapping[str, int]) -> PartyRun:
    """Return the run value set to another state; members drop what they hold and meet again."""
    return replace(
        _as_whole(run),
        membership=run.membership + 1,
        num_rows=num_rows,
        committed=base,
        metrics={},
        lineage=run.lineage + 1,
        open_segment=base.segment + 1,
        finished=(),
        left=frozenset(),
        deaths=Deaths(),
        is_recovering=False,
        stop_reason="",
    )


def returned(job: JobSpec, run: PartyRun, base: Base, metrics: Mapping[str, float]) -> PartyRun:
    """Return the run value after a return to an earlier commit of its own, which had these metrics,
    such as the steps skipped so far."""
    return replace(rebase(job, run, base, run.num_rows), metrics=metrics)


def restored(job: JobSpec, run: PartyRun, earlier: PartyRun) -> PartyRun:
    """Return the run value of the party as it goes on from the commit of an earlier run value."""
    if earlier.committed is None:
        return PartyRun(run.party, membership=run.membership + 1)
    run = replace(run, num_rows=earlier.num_rows)
    return returned(job, run, earlier.committed, earlier.metrics)


def latest_metrics(run: PartyRun) -> Mapping[str, float]:
    """Return the metrics of the newest trained segment, committed or not."""
    return run.finished[-1].metrics if run.finished else run.metrics


def stop_reason(job: JobSpec, run: PartyRun) -> str:
    """Return why no segment follows the newest one although steps are left; "" if one follows."""
    asked = run.finished[-1].stop_reason if run.finished else run.stop_reason
    return asked or why_stopped(job, latest_metrics(run))


def num_segments(job: JobSpec, run: PartyRun) -> int:
    """Return the number of segments of the whole run; the number of rows must be known."""
    return len(schedule_of(job, run.num_rows).ends())

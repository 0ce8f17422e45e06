"""Parties whose members hold what nobody else has, or do not reach each other: commits by parts,
mirrors of slices, and the way back to the last commit."""

from dataclasses import replace
from typing import Any

import pytest

from stratagem.common.base.ids import Party
from stratagem.common.job import JobSpec
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.effects import Base, CommitSegment, RunSegment
from stratagem.coordinator.core.strategy_contract import Strategy
from stratagem.coordinator.core.world import WorkerRecord, World
from stratagem.coordinator.strategies.synchronous import data_parallel
from stratagem.coordinator.strategies.synchronous.decisions import members_due, reform
from stratagem.coordinator.strategies.synchronous.party import (
    PartyRun,
    SegmentRules,
    one_part,
    part_per_member,
)
from stratagem.coordinator.strategies.synchronous.strategy import synchronous
from tests.coordinator.core.jobs import DATA_PARALLEL, LOCAL, evaluation_only, job_text
from tests.coordinator.core.simulation import (
    RUN,
    built,
    committed,
    digest,
    finished,
    member,
    register,
)

pytestmark = pytest.mark.core


ROOT = Party("")
JOB = JobSpec.from_json(job_text(LOCAL, checkpoint={"every": "5 steps"}))
EVALUATING = JobSpec.from_json(evaluation_only(LOCAL))
SHARED = SegmentRules(num_shards=3, min_members=1)
SOLE = SegmentRules(num_shards=3, min_members=1, parts_of=part_per_member, is_sole_copy=True)
PAIRS = SegmentRules(num_shards=4, min_members=2, parts_of=lambda m, _: (m[0::2], m[1::2]))
"""Two parts; two members hold each of them."""
MIRRORED = replace(SOLE, fewest_mirrored=3)
A, B, C, D = (member(name) for name in "abcd")


def under(shape: SegmentRules) -> Strategy:
    return synchronous(lambda _: shape)


def formed(membership: int, *members: f.Member, are_apart: bool = False) -> f.MembersFormed:
    of: dict[str, Any] = {"party": ROOT, "membership": membership, "members": members}
    return f.MembersFormed(**of, reason="test", are_apart=are_apart)


def done(run: PartyRun, step: int) -> f.SegmentFinished:
    return finished(run.open_segment, step, run.membership)


def commit_of(segment: int) -> f.SegmentCommitted:
    return committed(segment, 5 * segment, f"s{segment}")


def play(shape: SegmentRules, run: PartyRun, *facts: f.Fact) -> PartyRun:
    for fact in facts:
        assert under(shape).reject_reason(JOB, run, fact) == ""
        run = under(shape).transition(JOB, run, fact, 0.0)
    return run


def training(shape: SegmentRules, *members: f.Member, are_apart: bool = False) -> PartyRun:
    """Segment 1 is committed, 2 is finished, 3 is open."""
    run = play(shape, PartyRun(ROOT), formed(1, *members, are_apart=are_apart), built())
    run = play(shape, run, done(run, 5))
    run = play(shape, run, commit_of(1))
    return play(shape, run, done(run, 10))


def in_segment_three(*members: f.Member) -> PartyRun:
    """Segment 2 is committed, 3 is open."""
    return play(MIRRORED, training(MIRRORED, *members), commit_of(2))


def due(shape: SegmentRules, run: PartyRun) -> tuple[CommitSegment | None, RunSegment | None]:
    effects = under(shape).pending(RUN, JOB, run, None)
    commit = [each for each in effects if isinstance(each, CommitSegment)]
    segment = [each for each in effects if isinstance(each, RunSegment)]
    return (commit[0] if commit else None), (segment[0] if segment else None)


def commit_due(shape: SegmentRules, run: PartyRun) -> CommitSegment:
    commit, _ = due(shape, run)
    assert commit is not None
    return commit


def segment_due(shape: SegmentRules, run: PartyRun) -> RunSegment:
    _, segment = due(shape, run)
    assert segment is not None
    return segment


def world(names: str, **capability: Any) -> World:
    told = [register(name, **capability) for name in names]
    records = {r.member.worker_id: WorkerRecord(r.member, r.address, r.capability) for r in told}
    return World(records, {})


def decided(shape: SegmentRules, run: PartyRun, names: str, job: JobSpec = JOB) -> f.MembersFormed:
    fact = under(shape).decide(job, run, world(names), 0.0)
    assert isinstance(fact, f.MembersFormed)
    return fact


def place(run: PartyRun) -> tuple[int, int, int]:
    """The open segment, how many are finished before it, and the lineage."""
    return run.open_segment, len(run.finished), run.lineage


def test_a_commit_asks_every_member_for_its_part_or_any_holder_of_a_replicated_one() -> None:
    run = training(SOLE, A, B, C)
    commit, segment = commit_due(SOLE, run), segment_due(SOLE, run)
    assert (commit.segment, commit.parts) == (2, ((A,), (B,), (C,)))
    assert segment.parts == ((A,), (B,), (C,))
    run = play(PAIRS, training(PAIRS, A, B, C, D), formed(2, B, C, D))
    assert commit_due(PAIRS, run).parts == ((C,), (B, D))
    assert run.open_segment == 3
    run = play(PAIRS, training(PAIRS, A, B, C, D), formed(2, A, C))
    assert place(run) == (2, 0, 1), "all holders of one part are gone"


def test_a_spare_that_saw_a_later_segment_is_told_of_a_new_lineage() -> None:
    """It may be all that is left when the others are lost, and refuses what looks old to it."""
    shape = replace(PAIRS, parts_of=one_part)
    joined = play(shape, training(shape, A, B), formed(2, B, C))
    seen = segment_due(shape, joined)
    told = segment_due(shape, play(shape, joined, formed(3, C)))
    assert (seen.segment, told.segment) == (3, 2)
    assert told.lineage > seen.lineage


@pytest.mark.parametrize(
    "after",
    [(A, B), (A, B, D), (A, B, C), (A, B, C, D), (D,), ()],
    ids=["lost", "replaced", "re-formed", "joined", "all new", "nobody"],
)
def test_any_change_of_members_returns_sole_copies_to_the_last_commit(
    after: tuple[f.Member, ...],
) -> None:
    before = training(SOLE, A, B, C)
    assert place(before) == (3, 1, 0)
    run = play(SOLE, before, formed(2, *after))
    assert place(run) == (2, 0, 1)
    assert due(SOLE, run)[0] is None
    stale = under(SOLE).reject_reason(JOB, run, done(before, 15))
    assert "expected (segment, membership) (2, 2)" in stale, "what the old members still report"
    assert under(SOLE).reject_reason(JOB, run, commit_of(2))
    if not after:
        assert due(SOLE, run)[1] is None
        return
    segment = segment_due(SOLE, run)
    assert (segment.segment, segment.lineage, segment.members) == (2, 1, after)
    assert segment.base == Base(1, 5, digest("s1"))


def test_failed_exchange_returns_sole_copies_to_the_last_commit() -> None:
    before = training(SOLE, A, B, C)
    fact = under(SOLE).reform(JOB, before, ROOT, "socket closed")
    assert isinstance(fact, f.MembersFormed)
    assert fact.reason == "socket closed; back to the last commit, segment 1 at step 5"
    run = play(SOLE, before, fact)
    assert (run.members, run.membership, run.lineage) == ((A, B, C), 2, 1)
    assert run.open_segment == 2
    for spec, rules in ((JOB, SHARED), (EVALUATING, SOLE)):
        fact = under(rules).reform(spec, training(rules, A, B, C), ROOT, "socket closed")
        assert isinstance(fact, f.MembersFormed)
        assert fact.reason == "socket closed", "all hold all alike, or train nothing"


def test_lineage_rises_each_time_but_before_there_is_a_state_and_for_whole_replicas() -> None:
    run = play(SOLE, PartyRun(ROOT), formed(1, A), formed(2, A, B))
    assert run.lineage == 0
    run = play(SOLE, run, built(), formed(3, B), formed(4, B, C))
    assert (run.lineage, run.open_segment) == (2, 1)
    resumed = play(SOLE, training(SOLE, A, B, C), f.RunResumed(), formed(2, A, B, C))
    assert place(resumed) == (2, 0, 1), "after its last commit"
    shape = replace(SOLE, parts_of=one_part, is_sole_copy=False)
    run = play(shape, training(shape, A, B, C), formed(2, C))
    assert commit_due(shape, run).parts == ((C,),)
    segment = segment_due(shape, run)
    assert (segment.segment, segment.lineage) == (3, 0)


def test_joiner_of_sole_copies_waits_while_a_commit_is_due_but_a_loss_does_not() -> None:
    run = training(SOLE, A, B)
    assert under(SOLE).decide(JOB, run, world("abc"), 0.0) is None
    assert decided(SOLE, run, "ac").members == (A, C)
    assert decided(SOLE, play(SOLE, run, commit_of(2)), "abc").members == (A, B, C)


def divided(**options: Any) -> SegmentRules:
    return data_parallel._shape(JobSpec.from_json(job_text({**DATA_PARALLEL, "options": options})))


@pytest.mark.parametrize("partition_state", ["none", "optimizer"])
def test_slices_of_the_optimizers_state_are_sole_copies(partition_state: str) -> None:
    rules = divided(partition_state=partition_state)
    is_divided = partition_state == "optimizer"
    assert rules.is_sole_copy == is_divided
    assert rules.parts_of((A, B), ()) == (((A,), (B,)) if is_divided else ((A, B),))


# ---- slices with a mirror ----


@pytest.mark.parametrize(("mirror", "fewest"), [({}, 3), ({"mirror": 0}, None), ({"mirror": 1}, 2)])
def test_from_how_many_members_on_there_is_a_mirror(
    mirror: dict[str, int], fewest: int | None
) -> None:
    assert divided(partition_state="optimizer", **mirror).fewest_mirrored == fewest


@pytest.mark.parametrize(
    ("left", "has_returned"), [((B, C, D), False), ((A, C), False), ((A, B), True), ((), True)]
)
def test_slices_with_a_mirror_are_lost_with_neighbours_only(
    left: tuple[f.Member, ...], has_returned: bool
) -> None:
    run = play(MIRRORED, in_segment_three(A, B, C, D), formed(2, *left))
    assert (run.open_segment, run.lineage) == (3, int(has_returned))
    assert run.is_recovering


def test_a_snapshot_has_a_mirror_as_well() -> None:
    run = training(MIRRORED, A, B, C, D)
    commit = commit_due(MIRRORED, run)
    assert commit.parts == ((A,), (B,), (C,), (D,))
    assert commit.mirrors == ((B,), (C,), (D,), (A,))
    run = play(MIRRORED, run, formed(2, A, C))
    assert place(run) == (3, 1, 0)
    commit = commit_due(MIRRORED, run)
    assert segment_due(MIRRORED, run)
    assert commit.parts == ((A,), (), (C,), ())
    assert commit.mirrors == ((), (C,), (), (A,))
    assert commit.segment == 2
    run = play(MIRRORED, run, commit_of(2), formed(3, A))
    assert (run.open_segment, run.lineage) == (3, 1), "two have no mirrors"


def test_a_snapshot_is_lost_with_two_neighbours_and_that_of_few_has_no_mirror() -> None:
    run = play(MIRRORED, training(MIRRORED, A, B, C, D), formed(2, C, D))
    assert place(run) == (2, 0, 1)
    # One after the other: those that are left have divided the live state anew, but no snapshot.
    run = play(MIRRORED, training(MIRRORED, A, B, C, D), formed(2, B, C, D))
    assert len(run.finished) == 1
    assert place(play(MIRRORED, run, formed(3, C, D))) == (2, 0, 1)
    assert commit_due(MIRRORED, training(MIRRORED, A, B)).mirrors == ()
    run = play(MIRRORED, in_segment_three(A, B), formed(2, A))
    assert run.lineage == 1
    pairs = replace(SOLE, fewest_mirrored=2)
    run = play(pairs, play(pairs, training(pairs, A, B), commit_of(2)), formed(2, A))
    assert run.lineage == 0


def test_a_joiner_gets_a_slice_at_once() -> None:
    shape, run = replace(MIRRORED, num_shards=4), training(MIRRORED, A, B, C)
    fact = decided(shape, run, "abcd")
    assert fact.reason.endswith("; each slice of the state is left with one of them")
    assert place(play(shape, run, fact)) == (3, 1, 0)
    lost = decided(MIRRORED, in_segment_three(A, B, C), "a")
    assert lost.reason.endswith("; back to the last commit, segment 2 at step 10")


@pytest.mark.parametrize("waits", [False, True])
def test_where_no_slice_has_a_mirror_a_loss_names_the_commit_gone_back_to(waits: bool) -> None:
    shape = replace(SOLE, min_members=2 if waits else 1)
    run = in_segment_three(A, B)
    lost = decided(shape, run, "a")
    if waits:
        assert lost.reason == "b left, a released, 0 of 3 workers"
        run = play(shape, run, lost)
        lost = decided(shape, run, "ac")
    assert lost.reason.endswith("; back to the last commit, segment 2 at step 10")
    after = play(shape, run, lost)
    assert (after.open_segment, after.lineage) == (3, 1 + waits)


def test_what_is_not_gone_back_from_names_no_commit() -> None:
    alike = replace(SOLE, is_sole_copy=False, parts_of=one_part)
    assert decided(alike, in_segment_three(A, B), "a").reason == "b left, 1 of 3 workers"
    assert "back to" not in decided(SOLE, PartyRun(ROOT), "ab").reason
    run = play(SOLE, PartyRun(ROOT), formed(1, A, B), built())
    assert run.committed is not None
    trained, evaluated = (decided(SOLE, run, "c", job).reason for job in (JOB, EVALUATING))
    assert trained == f"{evaluated}; back to the last commit, segment 0 at step 0"


def test_members_that_miss_a_slice_return_to_the_last_commit() -> None:
    run = play(MIRRORED, in_segment_three(A, B, C, D), formed(2, B, C, D))
    lost = f.SoleCopiesLost(party=ROOT, segment=2, reason="a slice is gone", membership=2)
    after = play(MIRRORED, run, lost)
    assert (after.open_segment, after.lineage, after.membership) == (3, 1, 3)
    assert "membership 3" in under(MIRRORED).reject_reason(JOB, after, lost)


# ---- members that do not reach each other, as behind tunnels: none copies what it lacks ----


@pytest.mark.parametrize(
    ("before", "after"), [(False, False), (True, True), (True, False), (False, True)], ids=str
)
def test_members_that_are_apart_return_to_the_last_commit(before: bool, after: bool) -> None:
    run = play(SHARED, training(SHARED, A, B, are_apart=before), formed(2, A, are_apart=after))
    assert place(run) == ((2, 0, 1) if before or after else (3, 1, 0))
    assert run.are_apart is after


def test_so_they_do_when_an_exchange_has_failed() -> None:
    run = training(SHARED, A, B, are_apart=True)
    again = play(SHARED, run, reform(run, ROOT, "a stream ended"))
    assert place(again) == (2, 0, 1)
    assert again.are_apart


def test_members_behind_tunnels_are_apart_unless_there_is_only_one() -> None:
    for names, tunnelled, expected in (
        ("ab", True, True),
        ("ab", False, False),
        ("a", True, False),
    ):
        here = world(names, tunnelled=tunnelled)
        due = members_due(JOB, PartyRun(ROOT), SHARED, here)
        assert due is not None
        assert due.are_apart is expected


def test_another_one_that_is_apart_waits_for_the_next_commit() -> None:
    run, three = training(SHARED, A, B, are_apart=True), world("abc", tunnelled=True)
    assert members_due(JOB, run, SHARED, three) is None
    due = members_due(JOB, play(SHARED, run, commit_of(2)), SHARED, three)
    assert due is not None
    assert due.members == (A, B, C)

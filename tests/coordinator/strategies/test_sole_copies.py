"""Parties whose members hold what nobody else has: commits by parts, and the way back to them."""

from dataclasses import replace

import pytest

from stratagem.common.base.ids import Party
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import Base, CommitSegment, RunSegment
from stratagem.coordinator.core.facts import (
    Fact,
    Member,
    MembersFormed,
    ModelBuilt,
    RunResumed,
    SegmentCommitted,
    SegmentFinished,
    SoleCopiesLost,
)
from stratagem.coordinator.core.state import WorkerRecord, World
from stratagem.coordinator.core.strategy_contract import Strategy
from stratagem.coordinator.strategies.synchronous import data_parallel
from stratagem.coordinator.strategies.synchronous.segments.synchronous_run import (
    PartyRun,
    SegmentRules,
    one_part,
    part_per_member,
)
from stratagem.coordinator.strategies.synchronous.segments.synchronous_strategy import synchronous
from tests.coordinator.core.jobs import evaluation_only, job_text
from tests.coordinator.core.simulation import ROWS, RUN, digest, member, register

pytestmark = pytest.mark.core

ROOT = Party("")
JOB = JobSpec.from_json(job_text({"type": "Local"}, checkpoint={"every": "5 steps"}))
EVALUATING = JobSpec.from_json(evaluation_only({"type": "Local"}))
SHARED = SegmentRules(num_shards=3, min_members=1)
SOLE = SegmentRules(num_shards=3, min_members=1, parts_of=part_per_member, is_sole_copy=True)
PAIRS = SegmentRules(num_shards=4, min_members=2, parts_of=lambda m, _: (m[0::2], m[1::2]))
"""Two parts; two members hold each of them."""
A, B, C, D = (member(name) for name in "abcd")


def under(shape: SegmentRules) -> Strategy:
    return synchronous(lambda _: shape)


def formed(membership: int, *members: Member) -> MembersFormed:
    return MembersFormed(party=ROOT, membership=membership, members=members, reason="test")


def finished(run: PartyRun, step: int) -> SegmentFinished:
    return SegmentFinished(
        party=ROOT,
        segment=run.open_segment,
        step=step,
        membership=run.membership,
        loss=1.0,
        num_rows=1,
        seconds=1.0,
        engine="gloo",
        metrics={},
    )


def committed(segment: int) -> SegmentCommitted:
    return SegmentCommitted(
        party=ROOT,
        segment=segment,
        step=5 * segment,
        digest=digest(f"s{segment}"),
        size_bytes=1,
        metrics={},
    )


BUILT = ModelBuilt(
    party=ROOT,
    digest=digest("built"),
    size_bytes=1,
    num_rows=ROWS,
    num_parameters=1,
    layout_digest="x",
)


def play(shape: SegmentRules, run: PartyRun, *facts: Fact) -> PartyRun:
    for fact in facts:
        assert under(shape).reject_reason(JOB, run, fact) == ""
        run = under(shape).transition(JOB, run, fact, 0.0)
    return run


def training(shape: SegmentRules, *members: Member) -> PartyRun:
    """Segment 1 is committed, 2 is finished, 3 is open."""
    run = play(shape, PartyRun(ROOT), formed(1, *members), BUILT)
    run = play(shape, run, finished(run, 5))
    run = play(shape, run, committed(1))
    return play(shape, run, finished(run, 10))


def due(shape: SegmentRules, run: PartyRun) -> tuple[CommitSegment | None, RunSegment | None]:
    effects = under(shape).pending(RUN, JOB, run, None)
    commit = [each for each in effects if isinstance(each, CommitSegment)]
    segment = [each for each in effects if isinstance(each, RunSegment)]
    return (commit[0] if commit else None), (segment[0] if segment else None)


def test_commit_asks_every_member_for_its_part() -> None:
    commit, segment = due(SOLE, training(SOLE, A, B, C))
    assert commit is not None
    assert segment is not None
    assert (commit.segment, commit.parts) == (2, ((A,), (B,), (C,)))
    assert segment.parts == ((A,), (B,), (C,))


def test_commit_asks_any_holder_that_is_left_of_a_replicated_part() -> None:
    run = play(PAIRS, training(PAIRS, A, B, C, D), formed(2, B, C, D))
    commit, _ = due(PAIRS, run)
    assert commit is not None
    assert commit.parts == ((C,), (B, D))
    assert run.open_segment == 3


def test_party_returns_to_its_commit_when_all_holders_of_one_part_are_gone() -> None:
    run = play(PAIRS, training(PAIRS, A, B, C, D), formed(2, A, C))
    assert (run.open_segment, run.finished, run.lineage) == (2, (), 1)


def test_a_spare_that_saw_a_later_segment_is_told_of_a_new_lineage() -> None:
    """It may be all that is left when the others are lost, and refuses what looks old to it."""
    shape = replace(PAIRS, parts_of=one_part)
    joined = play(shape, training(shape, A, B), formed(2, B, C))
    _, seen = due(shape, joined)
    assert seen is not None
    _, told = due(shape, play(shape, joined, formed(3, C)))
    assert told is not None
    assert (seen.segment, told.segment) == (3, 2)
    assert told.lineage > seen.lineage


@pytest.mark.parametrize(
    "after",
    [(A, B), (A, B, D), (A, B, C), (A, B, C, D), (D,), ()],
    ids=["lost", "replaced", "re-formed", "joined", "all new", "nobody"],
)
def test_any_change_of_members_returns_sole_copies_to_the_last_commit(
    after: tuple[Member, ...],
) -> None:
    before = training(SOLE, A, B, C)
    assert (before.open_segment, before.lineage) == (3, 0)
    run = play(SOLE, before, formed(2, *after))
    assert (run.open_segment, run.finished) == (2, ())
    assert run.lineage == 1
    commit, segment = due(SOLE, run)
    assert commit is None
    if not after:
        assert segment is None
        return
    assert segment is not None
    assert (segment.segment, segment.lineage, segment.members) == (2, 1, after)
    assert segment.base == Base(1, 5, digest("s1"))


def test_failed_exchange_returns_sole_copies_to_the_last_commit() -> None:
    before = training(SOLE, A, B, C)
    fact = under(SOLE).reform(JOB, before, ROOT, "socket closed")
    assert isinstance(fact, MembersFormed)
    assert fact.reason == "socket closed; back to the last commit, segment 1 at step 5"
    run = play(SOLE, before, fact)
    assert (run.members, run.membership, run.lineage) == ((A, B, C), 2, 1)
    assert run.open_segment == 2


def test_failed_exchange_of_members_that_hold_all_alike_goes_back_to_no_commit() -> None:
    for spec, rules in ((JOB, SHARED), (EVALUATING, SOLE)):
        fact = under(rules).reform(spec, training(rules, A, B, C), ROOT, "socket closed")
        assert isinstance(fact, MembersFormed)
        assert fact.reason == "socket closed"


def test_lineage_rises_each_time_and_never_before_there_is_a_state() -> None:
    run = play(SOLE, PartyRun(ROOT), formed(1, A), formed(2, A, B))
    assert run.lineage == 0
    run = play(SOLE, run, BUILT, formed(3, B), formed(4, B, C))
    assert (run.lineage, run.open_segment) == (2, 1)


def test_what_the_old_members_still_report_is_stale() -> None:
    before = training(SOLE, A, B, C)
    run = play(SOLE, before, formed(2, A, B))
    assert "expected (segment, membership) (2, 2)" in under(SOLE).reject_reason(
        JOB, run, finished(before, 15)
    )
    assert under(SOLE).reject_reason(JOB, run, committed(2))


def test_resumed_run_begins_after_its_last_commit_with_a_new_lineage() -> None:
    run = play(SOLE, training(SOLE, A, B, C), RunResumed(), formed(2, A, B, C))
    assert (run.open_segment, run.lineage, run.finished) == (2, 1, ())


def test_replicas_of_the_whole_state_go_on_as_ever() -> None:
    shape = replace(SOLE, parts_of=one_part, is_sole_copy=False)
    run = play(shape, training(shape, A, B, C), formed(2, C))
    commit, segment = due(shape, run)
    assert commit is not None
    assert commit.parts == ((C,),)
    assert segment is not None
    assert (segment.segment, segment.lineage) == (3, 0)


def world(*names: str) -> World:
    records = [register(name) for name in names]
    return World(
        {r.member.worker_id: WorkerRecord(r.member, r.address, r.capability) for r in records}, {}
    )


def test_joiner_of_sole_copies_waits_while_a_commit_is_due() -> None:
    run = training(SOLE, A, B)
    assert under(SOLE).decide(JOB, run, world("a", "b", "c"), 0.0) is None
    run = play(SOLE, run, committed(2))
    fact = under(SOLE).decide(JOB, run, world("a", "b", "c"), 0.0)
    assert isinstance(fact, MembersFormed)
    assert fact.members == (A, B, C)


def test_loss_among_sole_copies_is_not_put_off() -> None:
    fact = under(SOLE).decide(JOB, training(SOLE, A, B), world("a", "c"), 0.0)
    assert isinstance(fact, MembersFormed)
    assert fact.members == (A, C)


@pytest.mark.parametrize("partition_state", ["none", "optimizer"])
def test_slices_of_the_optimizers_state_are_sole_copies(partition_state: str) -> None:
    strategy = {
        "type": "DataParallel",
        "num_replicas": 3,
        "aggregation": {"method": "AllReduce"},
        "options": {"partition_state": partition_state},
    }
    rules = data_parallel._shape(JobSpec.from_json(job_text(strategy)))
    is_divided = partition_state == "optimizer"
    assert rules.is_sole_copy == is_divided
    assert rules.parts_of((A, B), ()) == (((A,), (B,)) if is_divided else ((A, B),))


# ---- slices with a mirror ----

MIRRORED = replace(SOLE, fewest_mirrored=3)


def in_segment_three(*members: Member) -> PartyRun:
    """Segment 2 is committed, 3 is open."""
    return play(MIRRORED, training(MIRRORED, *members), committed(2))


@pytest.mark.parametrize(
    ("left", "has_returned"), [((B, C, D), False), ((A, C), False), ((A, B), True), ((), True)]
)
def test_slices_with_a_mirror_are_lost_with_neighbours_only(
    left: tuple[Member, ...], has_returned: bool
) -> None:
    run = play(MIRRORED, in_segment_three(A, B, C, D), formed(2, *left))
    assert (run.open_segment, run.lineage) == (3, int(has_returned))
    assert run.is_recovering


def test_a_snapshot_has_a_mirror_as_well() -> None:
    run = training(MIRRORED, A, B, C, D)
    commit, _ = due(MIRRORED, run)
    assert commit is not None
    assert commit.parts == ((A,), (B,), (C,), (D,))
    assert commit.mirrors == ((B,), (C,), (D,), (A,))
    run = play(MIRRORED, run, formed(2, A, C))
    assert (run.open_segment, run.lineage, len(run.finished)) == (3, 0, 1)
    commit, segment = due(MIRRORED, run)
    assert commit is not None
    assert segment is not None
    assert commit.parts == ((A,), (), (C,), ())
    assert commit.mirrors == ((), (C,), (), (A,))
    assert commit.segment == 2
    run = play(MIRRORED, run, committed(2), formed(3, A))
    assert (run.open_segment, run.lineage) == (3, 1), "two have no mirrors"


def test_a_snapshot_is_lost_with_two_neighbours() -> None:
    run = play(MIRRORED, training(MIRRORED, A, B, C, D), formed(2, C, D))
    assert (run.open_segment, run.lineage, run.finished) == (2, 1, ())
    # One after the other: those that are left have divided the live state anew, but no snapshot.
    run = play(MIRRORED, training(MIRRORED, A, B, C, D), formed(2, B, C, D))
    assert len(run.finished) == 1
    run = play(MIRRORED, run, formed(3, C, D))
    assert (run.open_segment, run.lineage, run.finished) == (2, 1, ())


def test_snapshots_of_few_have_no_mirror() -> None:
    run = training(MIRRORED, A, B)
    commit, _ = due(MIRRORED, run)
    assert commit is not None
    assert commit.mirrors == ()


def test_few_members_have_no_mirror() -> None:
    run = play(MIRRORED, in_segment_three(A, B), formed(2, A))
    assert run.lineage == 1
    pairs = replace(SOLE, fewest_mirrored=2)
    run = play(pairs, play(pairs, training(pairs, A, B), committed(2)), formed(2, A))
    assert run.lineage == 0


def test_a_joiner_gets_a_slice_at_once() -> None:
    run = training(MIRRORED, A, B, C)
    shape = replace(MIRRORED, num_shards=4)
    fact = under(shape).decide(JOB, run, world("a", "b", "c", "d"), 0.0)
    assert isinstance(fact, MembersFormed)
    assert fact.reason.endswith("; each slice of the state is left with one of them")
    run = play(shape, run, fact)
    assert (run.open_segment, run.lineage, len(run.finished)) == (3, 0, 1)
    lost = under(MIRRORED).decide(JOB, in_segment_three(A, B, C), world("a"), 0.0)
    assert isinstance(lost, MembersFormed)
    assert lost.reason.endswith("; back to the last commit, segment 2 at step 10")


@pytest.mark.parametrize("waits", [False, True])
def test_where_no_slice_has_a_mirror_a_loss_names_the_commit_gone_back_to(waits: bool) -> None:
    shape = replace(SOLE, min_members=2 if waits else 1)
    run = in_segment_three(A, B)
    lost = under(shape).decide(JOB, run, world("a"), 0.0)
    assert isinstance(lost, MembersFormed)
    if waits:
        assert lost.reason == "b left, a released, 0 of 3 workers"
        run = play(shape, run, lost)
        lost = under(shape).decide(JOB, run, world("a", "c"), 0.0)
        assert isinstance(lost, MembersFormed)
    assert lost.reason.endswith("; back to the last commit, segment 2 at step 10")
    after = play(shape, run, lost)
    assert (after.open_segment, after.lineage) == (3, 1 + waits)


def test_what_is_not_gone_back_from_names_no_commit() -> None:
    alike = replace(SOLE, is_sole_copy=False, parts_of=one_part)
    lost = under(alike).decide(JOB, in_segment_three(A, B), world("a"), 0.0)
    assert isinstance(lost, MembersFormed)
    assert lost.reason == "b left, 1 of 3 workers"
    first = under(SOLE).decide(JOB, PartyRun(ROOT), world("a", "b"), 0.0)
    assert isinstance(first, MembersFormed)
    assert "back to" not in first.reason


def test_members_that_miss_a_slice_return_to_the_last_commit() -> None:
    run = play(MIRRORED, in_segment_three(A, B, C, D), formed(2, B, C, D))
    lost = SoleCopiesLost(party=ROOT, segment=2, reason="a slice is gone", membership=2)
    after = play(MIRRORED, run, lost)
    assert (after.open_segment, after.lineage, after.membership) == (3, 1, 3)
    assert "membership 3" in under(MIRRORED).reject_reason(JOB, after, lost)


def test_a_party_that_trains_nothing_goes_back_to_no_commit() -> None:
    run = play(SOLE, PartyRun(ROOT), formed(1, A, B), BUILT)
    assert run.committed is not None
    reasons = []
    for spec in (JOB, EVALUATING):
        fact = under(SOLE).decide(spec, run, world("c"), 0.0)
        assert isinstance(fact, MembersFormed)
        reasons.append(fact.reason)
    trained, evaluated = reasons
    assert trained == f"{evaluated}; back to the last commit, segment 0 at step 0"


@pytest.mark.parametrize(("mirror", "fewest"), [(None, 3), (0, None), (1, 2)])
def test_from_how_many_members_on_there_is_a_mirror(mirror: int | None, fewest: int | None) -> None:
    options = {"partition_state": "optimizer", "mirror": mirror}
    strategy = {
        "type": "DataParallel",
        "num_replicas": 3,
        "aggregation": {"method": "AllReduce"},
        "options": {name: value for name, value in options.items() if value is not None},
    }
    assert data_parallel._shape(JobSpec.from_json(job_text(strategy))).fewest_mirrored == fewest

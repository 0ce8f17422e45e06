"""Members that do not reach each other, as behind tunnels: none copies what it lacks, so a party
whose members change returns to its last commit."""

import pytest

from stratagem.common.base.ids import Party
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.facts import (
    Capability,
    Fact,
    Member,
    MembersFormed,
    ModelBuilt,
    SegmentCommitted,
    SegmentFinished,
)
from stratagem.coordinator.core.state import WorkerRecord, World
from stratagem.coordinator.strategies.synchronous.segments.party_decisions import (
    members_due,
    reform,
)
from stratagem.coordinator.strategies.synchronous.segments.synchronous_run import (
    PartyRun,
    SegmentRules,
    transition,
)
from tests.coordinator.core.jobs import job_text
from tests.coordinator.core.simulation import ROWS, digest, member

pytestmark = pytest.mark.core

ROOT = Party("")
JOB = JobSpec.from_json(job_text({"type": "Local"}, checkpoint={"every": "5 steps"}))
RULES = SegmentRules(num_shards=3, min_members=1)
A, B, C = (member(name) for name in "abc")


def formed(membership: int, *members: Member, are_apart: bool) -> MembersFormed:
    return MembersFormed(
        party=ROOT, membership=membership, members=members, reason="test", are_apart=are_apart
    )


def fold(run: PartyRun, *facts: Fact) -> PartyRun:
    for fact in facts:
        run = transition(JOB, run, fact, RULES, 0.0)
    return run


def training(*, are_apart: bool) -> PartyRun:
    """Segment 1 is committed, 2 is finished, 3 is open."""
    run = fold(
        PartyRun(ROOT),
        formed(1, A, B, are_apart=are_apart),
        ModelBuilt(
            party=ROOT,
            digest=digest("built"),
            size_bytes=1,
            num_rows=ROWS,
            num_parameters=1,
            layout_digest="x",
        ),
    )
    for segment in (1, 2):
        finished = SegmentFinished(
            party=ROOT,
            segment=segment,
            step=5 * segment,
            membership=1,
            loss=1.0,
            num_rows=1,
            seconds=1.0,
            engine="server",
            metrics={},
        )
        run = fold(run, finished)
        if segment == 1:
            committed = SegmentCommitted(
                party=ROOT, segment=1, step=5, digest=digest("s1"), size_bytes=1, metrics={}
            )
            run = fold(run, committed)
    return run


def world(*members: Member, tunnelled: bool) -> World:
    capability = Capability(numerics_fingerprint="same", tunnelled=tunnelled)
    records = (WorkerRecord(each, "", capability) for each in members)
    return World({record.member.worker_id: record for record in records}, {})


def test_survivors_that_reach_each_other_go_on() -> None:
    run = fold(training(are_apart=False), formed(2, A, are_apart=False))
    assert (run.open_segment, len(run.finished), run.lineage) == (3, 1, 0)


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)], ids=str)
def test_members_that_are_apart_return_to_the_last_commit(before: bool, after: bool) -> None:
    run = fold(training(are_apart=before), formed(2, A, are_apart=after))
    assert (run.open_segment, run.finished, run.lineage) == (2, (), 1)
    assert run.are_apart is after


def test_so_they_do_when_an_exchange_has_failed() -> None:
    run = training(are_apart=True)
    again = fold(run, reform(run, ROOT, "a stream ended"))
    assert (again.open_segment, again.finished, again.lineage) == (2, (), 1)
    assert again.are_apart


def test_members_behind_tunnels_are_apart_unless_there_is_only_one() -> None:
    for members, tunnelled, expected in (((A, B), True, True), ((A, B), False, False)):
        due = members_due(JOB, PartyRun(ROOT), RULES, world(*members, tunnelled=tunnelled))
        assert due is not None
        assert due.are_apart is expected
    alone = members_due(JOB, PartyRun(ROOT), RULES, world(A, tunnelled=True))
    assert alone is not None
    assert not alone.are_apart


def test_another_one_waits_for_the_next_commit() -> None:
    run = training(are_apart=True)
    three = world(A, B, C, tunnelled=True)
    assert members_due(JOB, run, RULES, three) is None
    committed = SegmentCommitted(
        party=ROOT, segment=2, step=10, digest=digest("s2"), size_bytes=1, metrics={}
    )
    due = members_due(JOB, fold(run, committed), RULES, three)
    assert due is not None
    assert due.members == (A, B, C)

"""What only workers have of a commit: which commits have it, and the way when workers change."""

from typing import Any

import pytest

from stratagem.coordinator.core.commands import (
    CancelRun,
    DrainWorker,
    LeaveWorker,
    LoseWorker,
    Refusal,
    Report,
    ReportTrouble,
    ResumeRun,
)
from stratagem.coordinator.core.effects import CommitSegment, Effect, RunSegment, UploadCommit
from stratagem.coordinator.core.facts import (
    ROOT,
    CommitUploaded,
    MembersFormed,
    RunFailed,
    RunReleased,
    SegmentCommitted,
    SegmentFinished,
    SoleCopiesLost,
    UploadDue,
)
from stratagem.coordinator.core.state import RunPhase, RunRecord, retained
from stratagem.coordinator.core.state_machine.pending_effects import blobs_of, pending
from stratagem.coordinator.core.state_machine.rollback import resumed_from
from stratagem.coordinator.strategies.synchronous.segments.synchronous_run import RETURN_S
from tests.coordinator.core.jobs import DATA_PARALLEL, job_text
from tests.coordinator.core.simulation import RUN, Simulation, digest, member, register, start

pytestmark = pytest.mark.core


def four_a_round(num_steps: int = 60, **sections: Any) -> str:
    """Segments of 5 steps; each fourth is uploaded as a whole."""
    strategy = {**DATA_PARALLEL, "options": {"local_steps": 5, "upload_every": 4}}
    every = {"every": "5 steps"}
    return job_text(
        strategy, **{"epochs": None, "steps": num_steps, "checkpoint": every, **sections}
    )


def record(simulation: Simulation) -> RunRecord:
    return simulation.state.runs[RUN]


def until_committed(simulation: Simulation, segment: int) -> None:
    """Up to the moment of that commit; what is under way is forgotten."""
    while not any(f.segment == segment for f in simulation.facts(SegmentCommitted)):
        simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()


def due(simulation: Simulation, kind: type[Effect]) -> Any:
    found = [effect for effect in pending(simulation.state) if isinstance(effect, kind)]
    return found[0] if found else None


def go_on(simulation: Simulation) -> None:
    """As after a crash: all that is due happens."""
    simulation.crash()
    simulation.run()


def steps(simulation: Simulation) -> list[int]:
    return [fact.step for fact in simulation.facts(SegmentCommitted)]


def test_each_fourth_commit_and_the_last_one_are_whole() -> None:
    simulation = start(four_a_round(50), "a", "b")
    simulation.run()
    facts = simulation.facts(SegmentCommitted)
    assert [fact.segment for fact in facts if not fact.is_partial] == [4, 8, 10]
    finished = simulation.facts(SegmentFinished)
    assert [bool(fact.kept) for fact in finished] == [fact.is_partial for fact in facts]
    assert record(simulation).ended is RunPhase.COMPLETED


def test_a_partial_commit_is_pulled_from_any_member() -> None:
    simulation = start(four_a_round(), "a", "b")
    while due(simulation, CommitSegment) is None:
        simulation.tell(simulation.queue.popleft())
    commit = due(simulation, CommitSegment)
    assert commit.parts == ((member("a"), member("b")),)
    assert commit.is_partial


def test_members_go_on_from_their_own_files() -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    segment = due(simulation, RunSegment)
    simulation.tell(ReportTrouble(RUN, ROOT, segment.membership, "the exchange is cut"))
    segment = due(simulation, RunSegment)
    assert (segment.segment, segment.base.segment) == (7, 6)
    assert segment.kept == (digest("a after 6"), digest("b after 6"))
    go_on(simulation)
    assert steps(simulation) == [*range(5, 65, 5)]


def test_a_worker_that_comes_back_goes_on_with_its_replicas() -> None:
    """In the order in which they were kept, whoever is back first."""
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    simulation.tell(LoseWorker(member("a"), "gone"))
    assert due(simulation, RunSegment) is None
    assert due(simulation, UploadCommit) is None
    simulation.now_s += RETURN_S / 2
    simulation.tell(register("a", 1))
    segment = due(simulation, RunSegment)
    assert segment.members == (member("a", 1), member("b"))
    assert segment.base.segment == 6
    assert segment.kept == (digest("a after 6"), digest("b after 6"))
    go_on(simulation)
    assert steps(simulation) == [*range(5, 65, 5)]


@pytest.mark.parametrize("way", ["away too long", "left"])
def test_what_does_not_come_back_costs_the_way_to_the_last_whole_commit(way: str) -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    if way == "left":
        simulation.tell(LeaveWorker(member("b"), "for good"))
    else:
        simulation.tell(LoseWorker(member("b"), "gone"))
        deadline_s = simulation.agenda.next_deadline
        assert deadline_s == simulation.now_s + RETURN_S
        simulation.now_s = deadline_s
        simulation.tell(register("c"))
    (lost,) = simulation.facts(SoleCopiesLost)
    assert lost.segment == 6
    assert "b" in lost.reason
    segment = due(simulation, RunSegment)
    assert (segment.segment, segment.base.segment, segment.kept) == (5, 4, ())
    assert [commit.segment for commit in record(simulation).commits] == [0, 1, 2, 3, 4]
    assert simulation.agenda.next_deadline is None
    go_on(simulation)
    assert steps(simulation) == [*range(5, 35, 5), *range(25, 65, 5)]
    assert record(simulation).is_reproducible


def test_replicas_move_to_a_worker_that_joins_once_they_are_uploaded() -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    simulation.tell(register("c"))
    upload = due(simulation, UploadCommit)
    assert due(simulation, RunSegment) is None
    assert (upload.segment, upload.holders) == (6, (member("a"), member("b")))
    assert upload.kept == (digest("a after 6"), digest("b after 6"))
    assert digest("whole4") not in blobs_of(record(simulation))
    simulation.tell(simulation.queue.popleft())
    segment = due(simulation, RunSegment)
    assert (segment.base.segment, segment.base.digest) == (6, digest("whole6"))
    assert segment.kept == ()
    assert len(segment.members) == 3
    last = record(simulation).commits[-1]
    assert (last.segment, last.digest, last.is_partial) == (6, digest("whole6"), False)
    go_on(simulation)
    assert steps(simulation) == [*range(5, 65, 5)]


def test_a_worker_that_drains_is_asked_for_its_replicas() -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    simulation.tell(DrainWorker(member("b")))
    (asked,) = simulation.facts(UploadDue)
    assert asked.holders == (member("a"), member("b"))
    simulation.tell(simulation.queue.popleft())
    assert due(simulation, RunSegment).members == (member("a"),)
    simulation.tell(LeaveWorker(member("b"), "drained"))
    go_on(simulation)
    assert steps(simulation) == [*range(5, 65, 5)]


def test_a_worker_that_leaves_once_it_has_sent_its_replicas_is_not_missed() -> None:
    """It may have gone before they are stored with the rest."""
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    simulation.tell(DrainWorker(member("b")))
    simulation.tell(LeaveWorker(member("b"), "drained"))
    assert simulation.facts(SoleCopiesLost) == []
    simulation.run()
    assert [fact.segment for fact in simulation.facts(CommitUploaded)] == [6]
    assert steps(simulation) == [*range(5, 65, 5)]


def test_all_drain() -> None:
    """What they have is uploaded although nobody is left to go on."""
    simulation = start(four_a_round(), "a")
    until_committed(simulation, 6)
    simulation.tell(DrainWorker(member("a")))
    (asked,) = simulation.facts(UploadDue)
    assert "stops here" in asked.reason
    simulation.tell(simulation.queue.popleft())
    simulation.tell(LeaveWorker(member("a"), "drained"))
    simulation.tell(register("z"))
    assert due(simulation, RunSegment).base.digest == digest("whole6")


def test_all_are_away_for_long() -> None:
    """Without members there is nobody who waits, and so nothing is given up."""
    simulation = start(four_a_round(), "a")
    until_committed(simulation, 6)
    simulation.tell(LoseWorker(member("a"), "gone"))
    assert simulation.agenda.next_deadline is None
    simulation.now_s += 10 * RETURN_S
    simulation.tell(register("a", 1))
    segment = due(simulation, RunSegment)
    assert (segment.base.segment, segment.kept) == (6, (digest("a after 6"),))


def test_a_holder_that_restarts_is_asked_again_and_the_upload_says_if_it_is_gone() -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    simulation.tell(register("c"))
    simulation.tell(register("b", 1))
    assert due(simulation, UploadCommit).holders == (member("a"), member("b", 1))
    simulation.tell(LoseWorker(member("b", 1), "gone again"))
    assert simulation.facts(SoleCopiesLost) == []
    assert due(simulation, UploadCommit) is not None
    simulation.queue.clear()
    simulation.tell(Report(RUN, SoleCopiesLost(party=ROOT, segment=6, reason="b is lost")))
    assert due(simulation, RunSegment).base.segment == 4
    go_on(simulation)
    assert record(simulation).ended is RunPhase.COMPLETED


def test_a_file_that_is_lost_is_reported_once() -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    membership = due(simulation, RunSegment).membership
    lost = SoleCopiesLost(party=ROOT, segment=6, reason="no such file")
    for _ in range(2):
        simulation.tell(Report(RUN, lost))
    assert len(simulation.facts(SoleCopiesLost)) == 1
    segment = due(simulation, RunSegment)
    assert (segment.base.segment, segment.membership) == (4, membership + 1)
    late = CommitUploaded(party=ROOT, segment=6, digest=digest("late"), size_bytes=1)
    simulation.tell(Report(RUN, late))
    assert simulation.facts(CommitUploaded) == []


def test_a_stopped_run_uploads_its_last_commit_before_its_workers_forget_it() -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    simulation.tell(CancelRun(RUN, "somebody"))
    stopped = record(simulation)
    assert stopped.ended is RunPhase.CANCELLED
    assert stopped.reason.endswith(
        "commit 4 is kept, and 6 once its workers have uploaded their parts"
    )
    (upload,) = pending(simulation.state)
    assert isinstance(upload, UploadCommit)
    assert (upload.segment, upload.holders) == (6, (member("a"), member("b")))
    assert isinstance(simulation.tell(ResumeRun(RUN, "somebody")), Refusal)
    go_on(simulation)  # also after a crash of the coordinator
    assert [fact.segment for fact in simulation.facts(CommitUploaded)] == [6]
    assert not pending(simulation.state)
    assert resumed_from(record(simulation), 6, "me") is not None
    simulation.tell(ResumeRun(RUN, "somebody"))
    segment = due(simulation, RunSegment)
    assert (segment.base.segment, segment.base.digest) == (6, digest("whole6"))
    assert segment.kept == ()
    simulation.run()
    assert steps(simulation) == [*range(5, 65, 5)]


def test_a_run_that_fails_uploads_its_last_commit_too() -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    simulation.tell(Report(RUN, RunFailed(reason="a row is bad")))
    simulation.run()
    assert [fact.segment for fact in simulation.facts(CommitUploaded)] == [6]
    assert record(simulation).reason == "a row is bad"
    simulation.tell(ResumeRun(RUN, "somebody"))
    assert due(simulation, RunSegment).base.segment == 6


@pytest.mark.parametrize("when", ["at the stop", "before it", "after a join"])
def test_a_stopped_run_of_which_a_part_is_lost_goes_on_from_its_last_whole_commit(
    when: str,
) -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    if when == "before it":
        simulation.tell(LoseWorker(member("b"), "gone"))
    elif when == "after a join":
        simulation.tell(register("c"))
        simulation.queue.clear()
    simulation.tell(CancelRun(RUN, "somebody"))
    if when == "before it":
        assert due(simulation, UploadCommit) is None, "only b has its part"
    else:
        assert due(simulation, UploadCommit).holders == (member("a"), member("b"))
        simulation.queue.clear()
        lost = SoleCopiesLost(party=ROOT, segment=6, reason="b is lost")
        simulation.tell(Report(RUN, lost))
        assert isinstance(simulation.tell(Report(RUN, lost)), Refusal), "it was reported"
    simulation.run()
    simulation.crash()
    simulation.run()
    refusal = resumed_from(record(simulation), 6, "me")
    assert isinstance(refusal, str)
    assert "kept are" in refusal
    simulation.tell(ResumeRun(RUN, "somebody"))
    assert [commit.segment for commit in record(simulation).commits][-1] == 4
    assert due(simulation, RunSegment).base.segment == 4
    simulation.run()
    assert steps(simulation)[6:] == [*range(25, 65, 5)]


def test_an_upload_that_comes_after_the_release_is_stale() -> None:
    """As in journals of versions that did not upload at a stop."""
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 6)
    simulation.tell(CancelRun(RUN, "somebody"))
    simulation.queue.clear()
    simulation.tell(Report(RUN, RunReleased()))
    late = CommitUploaded(party=ROOT, segment=6, digest=digest("late"), size_bytes=1)
    assert isinstance(simulation.tell(Report(RUN, late)), Refusal)
    assert not pending(simulation.state)
    simulation.tell(ResumeRun(RUN, "somebody"))
    assert due(simulation, RunSegment).base.segment == 4


def test_the_whole_commit_before_partial_ones_is_kept() -> None:
    simulation = start(four_a_round(retention=1), "a", "b")
    until_committed(simulation, 7)
    (newest,) = retained(record(simulation))
    assert newest.segment == 7
    assert digest("segment4") in blobs_of(record(simulation))


def test_a_run_that_stops_early_ends_with_a_whole_commit() -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 5)
    segment = due(simulation, RunSegment)
    ended = SegmentFinished(
        party=ROOT,
        segment=6,
        step=28,
        membership=segment.membership,
        loss=1.0,
        num_rows=1,
        seconds=1.0,
        engine="gloo",
        metrics={},
        stop_reason="enough",
        kept=(digest("x"), digest("y")),
    )
    simulation.tell(Report(RUN, ended))
    simulation.run()
    assert [fact.segment for fact in simulation.facts(CommitUploaded)] == [6]
    assert record(simulation).ended is RunPhase.COMPLETED
    assert record(simulation).commits[-1].digest == digest("whole6")


def test_a_change_of_members_before_the_commit_returns_them_to_their_files() -> None:
    simulation = start(four_a_round(), "a", "b")
    until_committed(simulation, 5)
    before = len(simulation.facts(MembersFormed))
    simulation.tell(register("b", 1))
    assert len(simulation.facts(MembersFormed)) > before
    assert due(simulation, RunSegment).kept == (digest("a after 5"), digest("b after 5"))

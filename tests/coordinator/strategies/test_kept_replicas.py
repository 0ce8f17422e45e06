"""What only workers have of a commit, where replicas take local steps: which commits have it, where
their segments end, and the way when workers change."""

from typing import Any

import pytest

from stratagem.common.job import JobSpec
from stratagem.coordinator.core import commands as c
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.effects import CommitSegment, RunSegment, UploadCommit
from stratagem.coordinator.core.pending import blobs_of, pending
from stratagem.coordinator.core.retention import resumed_from
from stratagem.coordinator.core.state import retained
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.strategies.schedule import schedule_of
from stratagem.coordinator.strategies.synchronous.party import RETURN_S
from tests.coordinator.core.jobs import DATA_PARALLEL, job_text
from tests.coordinator.core.simulation import ROWS, RUN, Simulation, digest, finished, member, start

pytestmark = pytest.mark.core


def four_a_round(num_steps: int = 60, **sections: Any) -> str:
    """Segments of 5 steps; each fourth is uploaded as a whole."""
    strategy = {**DATA_PARALLEL, "options": {"local_steps": 5, "upload_every": 4}}
    steps = {"epochs": None, "steps": num_steps, "checkpoint": {"every": "5 steps"}}
    return job_text(strategy, **steps, **sections)


def until_committed(segment: int, workers: str = "ab", **sections: Any) -> Simulation:
    """At the moment of that commit; what is under way is forgotten."""
    simulation = start(four_a_round(**sections), *workers)
    simulation.until(f.SegmentCommitted, segment)
    simulation.queue.clear()
    return simulation


def segment_due(simulation: Simulation) -> RunSegment:
    return simulation.due_one(RunSegment)


def go_on(simulation: Simulation, steps: list[int] | None = None) -> None:
    """As after a crash: all that is due happens, and commits are at these steps."""
    simulation.crash()
    simulation.complete()
    assert [it.step for it in simulation.facts(f.SegmentCommitted)] == (steps or [*range(5, 65, 5)])


def uploaded(simulation: Simulation) -> list[int]:
    return [fact.segment for fact in simulation.facts(f.CommitUploaded)]


def lost(reason: str = "b is lost") -> f.SoleCopiesLost:
    return f.SoleCopiesLost(party=f.ROOT, segment=6, reason=reason)


KEPT = (digest("a after 6"), digest("b after 6"))
AGAIN = [*range(5, 35, 5), *range(25, 65, 5)]
"""The steps of commits, where a run has gone back from segment 6 to 4."""
LATE = f.CommitUploaded(party=f.ROOT, segment=6, digest=digest("late"), size_bytes=1)


def test_each_fourth_commit_and_the_last_one_are_whole_and_the_others_on_any_member() -> None:
    simulation = start(four_a_round(50), "a", "b")
    simulation.until_due(CommitSegment)
    commit = simulation.due_one(CommitSegment)
    assert (commit.parts, commit.is_partial) == (((member("a"), member("b")),), True)
    simulation.complete()
    facts = simulation.facts(f.SegmentCommitted)
    assert [fact.segment for fact in facts if not fact.is_partial] == [4, 8, 10]
    finished = simulation.facts(f.SegmentFinished)
    assert [bool(fact.kept) for fact in finished] == [fact.is_partial for fact in facts]


def test_members_go_on_from_their_own_files_also_when_they_come_back() -> None:
    """In the order in which they were kept, whoever is back first."""
    simulation = until_committed(6)
    simulation.lose("a", reason="gone")
    assert not simulation.due(RunSegment)
    assert not simulation.due(UploadCommit)
    simulation.now_s += RETURN_S / 2
    simulation.come("a", 1)
    segment = segment_due(simulation)
    assert segment.members == (member("a", 1), member("b"))
    assert (segment.base.segment, segment.kept) == (6, KEPT)
    go_on(simulation)
    simulation = until_committed(6)
    membership = segment_due(simulation).membership
    simulation.tell(c.ReportTrouble(RUN, f.ROOT, membership, "the exchange is cut"))
    segment = segment_due(simulation)
    assert (segment.segment, segment.base.segment, segment.kept) == (7, 6, KEPT)
    go_on(simulation)


@pytest.mark.parametrize("way", ["away too long", "left"])
def test_what_does_not_come_back_costs_the_way_to_the_last_whole_commit(way: str) -> None:
    simulation = until_committed(6)
    if way == "left":
        simulation.tell(c.LeaveWorker(member("b"), "for good"))
    else:
        simulation.lose("b", reason="gone")
        deadline_s = simulation.agenda.next_deadline
        assert deadline_s == simulation.now_s + RETURN_S
        simulation.now_s = deadline_s
        simulation.come("c")
    fact = simulation.fact(f.SoleCopiesLost)
    assert fact.segment == 6
    assert "b" in fact.reason
    segment = segment_due(simulation)
    assert (segment.segment, segment.base.segment, segment.kept) == (5, 4, ())
    assert [commit.segment for commit in simulation.record.commits] == [0, 1, 2, 3, 4]
    assert simulation.agenda.next_deadline is None
    go_on(simulation, AGAIN)
    assert simulation.record.is_reproducible


def test_replicas_move_to_a_worker_that_joins_once_they_are_uploaded() -> None:
    simulation = until_committed(6)
    simulation.come("c")
    upload = simulation.due_one(UploadCommit)
    assert not simulation.due(RunSegment)
    assert (upload.segment, upload.holders) == (6, (member("a"), member("b")))
    assert upload.kept == KEPT
    assert digest("whole4") not in blobs_of(simulation.record)
    simulation.step()
    segment = segment_due(simulation)
    assert (segment.base.segment, segment.base.digest) == (6, digest("whole6"))
    assert (segment.kept, len(segment.members)) == ((), 3)
    last = simulation.record.commits[-1]
    assert (last.segment, last.digest, last.is_partial) == (6, digest("whole6"), False)
    go_on(simulation)


@pytest.mark.parametrize("leaves_early", [False, True])
def test_a_worker_that_drains_is_asked_for_its_replicas(leaves_early: bool) -> None:
    """It may have gone, once it has sent them, before they are stored with the rest."""
    simulation = until_committed(6)
    simulation.tell(c.DrainWorker(member("b")))
    assert simulation.fact(f.UploadDue).holders == (member("a"), member("b"))
    if not leaves_early:
        simulation.step()
        assert segment_due(simulation).members == (member("a"),)
    simulation.tell(c.LeaveWorker(member("b"), "drained"))
    assert simulation.facts(f.SoleCopiesLost) == []
    if leaves_early:
        simulation.run()
    go_on(simulation)
    assert uploaded(simulation) == [6]


@pytest.mark.parametrize("is_marked", [False, True])
def test_who_has_left_with_replicas_is_not_waited_for_also_if_it_is_remembered(
    is_marked: bool,
) -> None:
    simulation = until_committed(6)
    simulation.now_s = 9.0
    if is_marked:
        simulation.happen(f.WorkerMarked(worker_id=member("b").worker_id, reason="refuted"))
    simulation.tell(c.LeaveWorker(member("b"), "stopped"))
    assert simulation.fact(f.SoleCopiesLost).reason == "what only b had is gone with it"
    assert simulation.facts(f.MembersFormed)[-1].reason.startswith("b left, 1 of 3 workers")
    go_on(simulation, AGAIN)


def test_nothing_is_given_up_where_all_are_away_or_drain() -> None:
    """Without members there is nobody who waits, and so nothing is given up."""
    simulation = until_committed(6, "a")
    simulation.lose("a", reason="gone")
    assert simulation.agenda.next_deadline is None
    simulation.now_s += 10 * RETURN_S
    simulation.come("a", 1)
    segment = segment_due(simulation)
    assert (segment.base.segment, segment.kept) == (6, KEPT[:1])
    simulation = until_committed(6, "a")
    simulation.tell(c.DrainWorker(member("a")))
    assert "stops here" in simulation.fact(f.UploadDue).reason
    simulation.step()
    simulation.tell(c.LeaveWorker(member("a"), "drained"))
    simulation.come("z")
    assert segment_due(simulation).base.digest == digest("whole6")


def test_a_holder_that_restarts_is_asked_again_and_the_upload_says_if_it_is_gone() -> None:
    simulation = until_committed(6)
    simulation.come("c")
    simulation.come("b", 1)
    assert simulation.due_one(UploadCommit).holders == (member("a"), member("b", 1))
    simulation.lose("b", 1, reason="gone again")
    assert simulation.facts(f.SoleCopiesLost) == []
    assert simulation.due(UploadCommit)
    simulation.queue.clear()
    simulation.report(lost())
    assert segment_due(simulation).base.segment == 4
    go_on(simulation, AGAIN)


def test_a_file_that_is_lost_is_reported_once() -> None:
    simulation = until_committed(6)
    membership = segment_due(simulation).membership
    for _ in range(2):
        simulation.tell(c.Report(RUN, lost("no such file")))
    assert len(simulation.facts(f.SoleCopiesLost)) == 1
    segment = segment_due(simulation)
    assert (segment.base.segment, segment.membership) == (4, membership + 1)
    simulation.tell(c.Report(RUN, LATE))
    assert simulation.facts(f.CommitUploaded) == []


def test_a_stopped_run_uploads_its_last_commit_before_its_workers_forget_it() -> None:
    simulation = until_committed(6)
    simulation.tell(c.CancelRun(RUN, "somebody"))
    stopped = simulation.record
    assert stopped.ended is RunPhase.CANCELLED
    assert stopped.reason.endswith(
        "commit 4 is kept, and 6 once its workers have uploaded their parts"
    )
    (upload,) = pending(simulation.state)
    assert isinstance(upload, UploadCommit)
    assert (upload.segment, upload.holders) == (6, (member("a"), member("b")))
    simulation.refusal(c.ResumeRun(RUN, "somebody"))
    simulation.crash()
    simulation.run()
    assert uploaded(simulation) == [6]
    assert not pending(simulation.state)
    assert resumed_from(simulation.record, 6, "me") is not None
    simulation.tell(c.ResumeRun(RUN, "somebody"))
    segment = segment_due(simulation)
    assert (segment.base.segment, segment.base.digest) == (6, digest("whole6"))
    assert segment.kept == ()
    go_on(simulation)


def test_a_run_that_fails_uploads_its_last_commit_too() -> None:
    simulation = until_committed(6)
    simulation.report(f.RunFailed(reason="a row is bad"))
    simulation.run()
    assert uploaded(simulation) == [6]
    assert simulation.record.reason == "a row is bad"
    simulation.tell(c.ResumeRun(RUN, "somebody"))
    assert segment_due(simulation).base.segment == 6


@pytest.mark.parametrize("when", ["at the stop", "before it", "after a join"])
def test_a_stopped_run_of_which_a_part_is_lost_goes_on_from_its_last_whole_commit(
    when: str,
) -> None:
    simulation = until_committed(6)
    if when == "before it":
        simulation.lose("b", reason="gone")
    elif when == "after a join":
        simulation.come("c")
        simulation.queue.clear()
    simulation.tell(c.CancelRun(RUN, "somebody"))
    if when == "before it":
        assert not simulation.due(UploadCommit), "only b has its part"
    else:
        assert simulation.due_one(UploadCommit).holders == (member("a"), member("b"))
        simulation.queue.clear()
        simulation.report(lost())
        assert simulation.refusal(lost()), "it was reported"
    simulation.run()
    simulation.crash()
    simulation.run()
    refusal = resumed_from(simulation.record, 6, "me")
    assert isinstance(refusal, str)
    assert "kept are" in refusal
    simulation.tell(c.ResumeRun(RUN, "somebody"))
    assert simulation.record.commits[-1].segment == 4
    assert segment_due(simulation).base.segment == 4
    simulation.complete()
    assert [fact.step for fact in simulation.facts(f.SegmentCommitted)] == AGAIN


def test_an_upload_that_comes_after_the_release_is_stale() -> None:
    """As in journals of versions that did not upload at a stop."""
    simulation = until_committed(6)
    simulation.tell(c.CancelRun(RUN, "somebody"))
    simulation.queue.clear()
    simulation.report(f.RunReleased())
    simulation.refusal(LATE)
    assert not pending(simulation.state)
    simulation.tell(c.ResumeRun(RUN, "somebody"))
    assert segment_due(simulation).base.segment == 4


def test_a_run_that_stops_early_ends_with_a_whole_commit_and_keeps_the_last_such() -> None:
    simulation = until_committed(5)
    membership, kept = segment_due(simulation).membership, (digest("x"), digest("y"))
    simulation.report(finished(6, 28, membership, stop_reason="enough", kept=kept))
    simulation.complete()
    assert uploaded(simulation) == [6]
    assert simulation.record.commits[-1].digest == digest("whole6")
    simulation = until_committed(7, retention=1)
    (newest,) = retained(simulation.record)
    assert newest.segment == 7
    assert digest("segment4") in blobs_of(simulation.record)


def test_a_change_of_members_before_the_commit_returns_them_to_their_files() -> None:
    simulation = until_committed(5)
    before = len(simulation.facts(f.MembersFormed))
    simulation.come("b", 1)
    assert len(simulation.facts(f.MembersFormed)) > before
    assert segment_due(simulation).kept == (digest("a after 5"), digest("b after 5"))


# ---- where segments end ----


def steps(num_steps: int, **sections: Any) -> dict[str, Any]:
    return {"epochs": None, "steps": num_steps, **sections}


EIGHT, TWELVE = {"every": "8 steps"}, {"every": "12 steps"}


@pytest.mark.parametrize(
    ("local_steps", "sections", "ends"),
    [
        # An epoch of 10 steps is committed where the replicas are joined next.
        (4, {"epochs": 2}, (12, 20)),
        (10, {"epochs": 2}, (10, 20)),
        (50, {"epochs": 2}, (20,)),
        (4, steps(10, checkpoint=EIGHT), (8, 10)),
        (4, steps(20, checkpoint=TWELVE, evaluation={"split": "test", **EIGHT}), (8, 12, 16, 20)),
        (3, steps(7, evaluation={"split": "test"}), (3, 6, 7)),
    ],
)
def test_segments_end_where_replicas_are_joined(
    local_steps: int, sections: dict[str, Any], ends: tuple[int, ...]
) -> None:
    strategy = {**DATA_PARALLEL, "options": {"local_steps": local_steps}}
    assert schedule_of(JobSpec.from_json(job_text(strategy, **sections)), ROWS).ends() == ends


def test_a_lost_member_returns_all_replicas_to_the_last_commit() -> None:
    each_whole = {**DATA_PARALLEL, "options": {"local_steps": 5, "upload_every": 1}}
    job = job_text(each_whole, **steps(20, checkpoint={"every": "5 steps"}))
    simulation = start(job, "a", "b")
    simulation.go_on(4)
    segment = segment_due(simulation)
    assert segment.parts == ((member("a"),), (member("b"),))
    committed = segment.base.segment
    simulation.queue.clear()
    simulation.lose("b", reason="gone")
    again = segment_due(simulation)
    assert (again.segment, again.base.segment) == (committed + 1, committed)
    assert again.lineage > segment.lineage
    assert again.parts == ((member("a"),),)
    go_on(simulation, [5, 10, 15, 20])

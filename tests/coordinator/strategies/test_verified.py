"""Runs that are verified while they train, in the pure core: who verifies, and what follows."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from stratagem.common.base.ids import Digest, RunId, WorkerId
from stratagem.common.numerics.verification import VERIFIER, Conclusion
from stratagem.coordinator.core import effects as e
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import (
    CancelRun,
    DrainWorker,
    LeaveWorker,
    RecordVerification,
    Report,
    ResumeRun,
    SubmitRun,
)
from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.run_view import view_of
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.strategies import nested
from tests.coordinator.core.jobs import DATA_PARALLEL, GOSSIP, LOCAL, job_text
from tests.coordinator.core.raising_strategies import raising
from tests.coordinator.core.simulation import RUN, Simulation, member, start
from tests.coordinator.strategies.computing import Computing, Disturb, nobody, run, verified

pytestmark = pytest.mark.core


def undisturbed(strategy: dict[str, Any]) -> list[tuple[int, Digest]]:
    return run(verified(strategy, 0.0), "a", "b", "c").course


def always(name: str, segment: int = 2) -> Disturb:
    """A worker that adds a bit to whatever it computes in this segment."""
    return lambda names, number, _: "!" * (name in names and number == segment)


def once(name: str) -> Disturb:
    """A worker that is wrong in segment 2 until another one has computed it."""
    seen: list[bool] = []

    def disturb(names: frozenset[str], segment: int, _number: int) -> str:
        if segment != 2:
            return ""
        if name not in names:
            seen[:] = [True] * len(seen)
            return ""
        if True in seen:
            return ""
        seen.append(False)
        return "!"

    return disturb


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP])
def test_what_is_right_is_verified_and_nothing_else_changes(strategy: dict[str, Any]) -> None:
    simulation = run(verified(strategy), "a", "b", "c", "d")
    assert simulation.record.ended is RunPhase.COMPLETED, simulation.record.reason
    assert simulation.course == undisturbed(strategy)
    facts = simulation.facts(f.SegmentVerified)
    assert [fact.segment for fact in facts] == [1, 2, 3, 4]
    assert not simulation.facts(f.SegmentRefuted)
    assert simulation.record.is_reproducible
    assert simulation.record.engine == "shm", "that of the run, not of its verifier"
    run_view = view_of(world_of(simulation.state), simulation.record, 0.0)
    assert run_view.verification == "4 chosen segments verified"
    workers = {name for _, names in simulation.verifying() for name in names}
    trainers = {name for party, _, names in simulation.computed if not party for name in names}
    assert not workers & trainers
    assert all(len(names) == 1 for _, names in simulation.verifying())


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP])
@pytest.mark.parametrize("disturb", [always, once])
def test_a_run_that_was_wrong_ends_with_the_states_of_an_undisturbed_one(
    strategy: dict[str, Any], disturb: Callable[[str], Disturb], crashes: bool
) -> None:
    workers = ("a", "b", "c", "d", "e")
    simulation = run(verified(strategy), *workers, disturb=disturb("a"), crashes=crashes)
    assert simulation.record.ended is RunPhase.COMPLETED, simulation.record.reason
    assert simulation.course == undisturbed(strategy)
    assert simulation.record.is_reproducible
    refuted = simulation.fact(f.SegmentRefuted)
    assert (refuted.segment, refuted.conclusion) == (2, Conclusion.RUN)
    assert "a" in refuted.workers[0]
    assert simulation.fact(f.RunResumed).from_segment == 1
    assert simulation.status.extra["verification"] == "4 chosen segments verified, 1 refuted"
    quarantined = [fact.worker_id for fact in simulation.facts(f.WorkerQuarantined)]
    marked = [fact.worker_id for fact in simulation.facts(f.WorkerMarked)]
    if disturb is always:
        assert (quarantined, marked) == (["a"], [])
        assert refuted.quarantined == ("a",)
        later = simulation.computed[-1]
        assert "a" not in later[2]
    else:
        assert quarantined == []
        assert marked == sorted(refuted.workers[0]) == list(refuted.marked)


@pytest.mark.parametrize(
    ("workers", "executions"),
    [("abc", (("a",), ("c",), ("b",))), ("ab", (("a",), ("b",)))],
)
def test_members_that_verify_themselves_execute_a_segment_once_each(
    workers: str, executions: tuple[tuple[str, ...], ...]
) -> None:
    """The third execution is that of another worker, the best that there is."""
    simulation = run(
        verified({**DATA_PARALLEL, "num_replicas": 2}, on="members"),
        *workers,
        disturb=lambda _n, k, number: "!" * ((k, number) == (2, 0)),
    )
    assert simulation.fact(f.SegmentRefuted).workers == (("a", "b"), *executions)


def test_a_wrong_worker_that_has_left_is_nobody_to_punish() -> None:
    simulation = begun(verified(), *"abcd", disturb=always("a"))
    simulation.until(f.SegmentCommitted, 3)
    assert not simulation.facts(f.SegmentRefuted)
    simulation.tell(LeaveWorker(member("a"), "asked to"))
    simulation.complete()
    refuted = simulation.fact(f.SegmentRefuted)
    assert (refuted.conclusion, refuted.marked) == (Conclusion.RUN, ("a",))
    assert not simulation.facts(f.WorkerMarked)
    assert simulation.course == undisturbed(LOCAL)


@pytest.mark.parametrize("disturb", [always, once])
def test_a_verifier_that_is_wrong_is_told_from_the_run(
    disturb: Callable[[str], Disturb],
) -> None:
    # The run is on the first worker by name, and its verifier on the next one.
    simulation = run(verified(), "a", "b", "c", "d", disturb=disturb("b"))
    assert simulation.course == undisturbed(LOCAL)
    refuted = simulation.fact(f.SegmentRefuted)
    assert refuted.conclusion is Conclusion.VERIFIER
    assert not simulation.facts(f.RunResumed)
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)] == [1, 3, 4]
    names = [fact.worker_id for fact in simulation.facts(f.WorkerQuarantined)]
    assert names == (["b"] if disturb is always else [])
    assert refuted.marked == (() if disturb is always else ("b",))


def test_a_job_that_does_not_repeat_itself_is_verified_no_more() -> None:
    simulation = run(
        verified(), "a", "b", "c", disturb=lambda _n, segment, number: str(number) * (segment == 2)
    )
    assert simulation.record.ended is RunPhase.COMPLETED
    assert simulation.fact(f.SegmentRefuted).conclusion is Conclusion.JOB
    assert not simulation.record.is_reproducible
    assert not simulation.facts(f.WorkerMarked)
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)] == [1]
    assert simulation.status.extra["verification"].endswith("as the bits do not repeat")


@pytest.mark.parametrize(
    ("disturb", "conclusion"),
    [(once("a"), Conclusion.RUN), (always("a"), Conclusion.OPEN), (once("b"), Conclusion.OPEN)],
)
def test_two_workers_decide_only_if_the_one_of_the_run_corrects_itself(
    disturb: Disturb, conclusion: Conclusion
) -> None:
    simulation = run(verified(), "a", "b", disturb=disturb)
    assert simulation.record.ended is RunPhase.COMPLETED
    refuted = simulation.fact(f.SegmentRefuted)
    assert refuted.conclusion is conclusion
    assert not refuted.quarantined
    assert simulation.record.is_reproducible is (conclusion is Conclusion.RUN)
    if conclusion is Conclusion.RUN:
        assert (simulation.course, refuted.marked) == (undisturbed(LOCAL), ("a",))
    else:
        assert refuted.marked == ("a", "b")


def test_two_marks_within_a_day_quarantine() -> None:
    simulation = run(verified(), "a", "b", "c", disturb=once("a"))
    assert [fact.worker_id for fact in simulation.facts(f.WorkerMarked)] == ["a"]
    for hours, names in ((30, []), (40, ["a"])):
        simulation.now_s = hours * 3600.0
        record = simulation.state.workers[WorkerId("a")]
        assert 0 < record.marked_s < simulation.now_s
        simulation.disturb = once("a")
        text = verified(name=f"after-{hours}-hours")
        simulation.tell(SubmitRun(RunId(f"run-{hours}"), text, 0.0))
        while simulation.queue:
            simulation.step()
        assert [fact.worker_id for fact in simulation.facts(f.WorkerQuarantined)] == names


def test_a_mark_since_the_difference_is_of_the_same_fault() -> None:
    """As where two runs have the worker, and both decide after it was wrong once."""
    simulation = begun(verified(), "a", "b", "c", disturb=once("a"))
    simulation.now_s = 5.0
    while (2, frozenset("c")) not in simulation.verifying():
        simulation.step()
    simulation.now_s = 8.0
    simulation.happen(f.WorkerMarked(worker_id=WorkerId("a"), reason="by another run"))
    simulation.now_s = 12.0
    simulation.complete()
    assert simulation.fact(f.SegmentRefuted).marked == ("a",)
    assert len(simulation.facts(f.WorkerMarked)) == 1
    assert not simulation.facts(f.WorkerQuarantined)


def test_without_a_worker_to_spare_the_run_ends_unverified() -> None:
    simulation = run(verified(), "a")
    assert simulation.course == undisturbed(LOCAL)
    reason = simulation.fact(f.RunCompleted).reason
    assert reason == (
        "20 steps committed; 0 of 4 chosen segments verified, as verification.on found no worker "
        "for them"
    )
    assert run(verified(on="any"), "a").record.ended is RunPhase.COMPLETED
    # Its members change places instead, and a worker verifies what it has computed itself.
    first = run(verified(on="members"), "a", disturb=lambda _n, k, num: "!" * ((k, num) == (2, 0)))
    assert first.course == undisturbed(LOCAL)
    assert first.fact(f.SegmentRefuted).conclusion is Conclusion.RUN


def test_a_run_that_waits_for_its_verification_alone_says_so() -> None:
    simulation = Computing()
    simulation.come("ab")
    simulation.tell(SubmitRun(RUN, verified(), 0.0))
    phases = []
    while simulation.queue:
        phases.append(simulation.status.strategy_phase)
        simulation.step()
    assert list(dict.fromkeys(phases))[-2:] == ["COMMITTING", "VERIFYING"]


def test_a_sample_is_the_same_each_time_and_few_checks_wait() -> None:
    chosen = [
        [
            fact.segment
            for fact in run(verified(sample=0.4, steps=60, epochs=None), *"abc").facts(
                f.SegmentVerified
            )
        ]
        for _ in range(2)
    ]
    assert chosen[0] == chosen[1]
    assert 0 < len(chosen[0]) < 12


def test_a_verifier_that_is_lost_or_fails_changes_nothing() -> None:
    simulation = Computing()
    simulation.come("abc")
    simulation.tell(SubmitRun(RUN, verified(), 0.0))
    while not simulation.verifying():
        simulation.step()
    simulation.lose("b")
    simulation.run()
    assert simulation.course == undisturbed(LOCAL)
    assert {name for _, names in simulation.verifying()[1:] for name in names} == {"c"}
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)] == [1, 2, 3, 4]
    failing = Computing()
    failing.come("ab")
    failing.tell(SubmitRun(RUN, verified(), 0.0))
    while not failing.verifying():
        failing.step()
    failing.report(f.PartyFailed(party=VERIFIER, reason="its code raised"))
    failing.run()
    assert failing.record.ended is RunPhase.COMPLETED
    assert failing.course == undisturbed(LOCAL)


def test_a_stopped_run_is_resumed_without_its_old_checks() -> None:
    simulation = Computing()
    simulation.come("abc")
    simulation.tell(SubmitRun(RUN, verified(), 0.0))
    simulation.until(f.SegmentCommitted, 2)
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    simulation.crash()
    simulation.run()
    assert simulation.record.ended is RunPhase.COMPLETED
    assert simulation.course == undisturbed(LOCAL)
    assert not simulation.facts(f.SegmentRefuted)


def apart(names: frozenset[str], segment: int, _number: int) -> str:
    """Members compute other bits together than alone, as by a defect of their exchange."""
    return "!" * (segment == 2 and len(names) > 1 and "a" in names)


def test_members_that_are_wrong_only_together_are_replaced_and_not_quarantined() -> None:
    simulation = run(verified(DATA_PARALLEL), *"abcdef", disturb=apart)
    conclusions = [fact.conclusion for fact in simulation.facts(f.SegmentRefuted)]
    assert conclusions == [Conclusion.RUN, Conclusion.RUN]
    assert simulation.course == undisturbed(DATA_PARALLEL)
    assert simulation.record.is_reproducible
    trainers = [names for party, _, names in simulation.computed if not party]
    assert not trainers[-1] & set(simulation.facts(f.SegmentRefuted)[-1].workers[0])
    assert not simulation.facts(f.WorkerQuarantined)


@pytest.mark.parametrize("workers", ["abc", "abcd"])
def test_a_run_that_others_cannot_train_rightly_either_says_that_its_bits_do_not_repeat(
    workers: str,
) -> None:
    def together(names: frozenset[str], segment: int, _number: int) -> str:
        return "!" * (segment == 2 and len(names) > 1)

    strategy = {**DATA_PARALLEL, "num_replicas": 2, "options": {"min_replicas": 2}}
    simulation = run(verified(strategy, on="any"), *workers, disturb=together)
    assert simulation.record.ended is RunPhase.COMPLETED
    conclusions = [fact.conclusion for fact in simulation.facts(f.SegmentRefuted)]
    assert conclusions == [Conclusion.RUN] * (len(workers) - 2) + [Conclusion.OPEN]
    assert not simulation.record.is_reproducible
    assert not simulation.facts(f.WorkerQuarantined)


def test_a_worker_that_is_wrong_only_when_it_trains_is_asked_once_more() -> None:
    """It verifies itself, as there is no other; each third execution is that of the run."""
    simulation = run(
        verified(on="members"),
        "a",
        disturb=lambda _n, k, number: "!" * (k == 2 and number % 3 == 0),
    )
    conclusions = [fact.conclusion for fact in simulation.facts(f.SegmentRefuted)]
    assert conclusions == [Conclusion.RUN, Conclusion.OPEN]


def differing(simulation: Computing, *minority: str) -> None:
    """The members' replicas differ at the end of the segment that they train."""
    (due,) = [each for each in simulation.due(e.RunSegment) if not each.party]
    simulation.queue = deque(
        each for each in simulation.queue if getattr(each.fact, "party", "") == VERIFIER
    )
    names = tuple(map(WorkerId, minority))
    of: dict[str, Any] = {"segment": due.segment, "step": due.to_step, "minority": names}
    simulation.tell(Report(RUN, f.ReplicasDiffer(party=f.ROOT, reason="they differ", **of)))


def test_replicas_that_differ_return_to_the_last_commit_instead_of_failing() -> None:
    simulation = Computing()
    simulation.come("abcd")
    simulation.tell(SubmitRun(RUN, verified(DATA_PARALLEL), 0.0))
    simulation.until(f.SegmentCommitted)
    simulation.now_s = 5.0
    differing(simulation, "b")
    simulation.now_s = 9.0
    assert [fact.worker_id for fact in simulation.facts(f.WorkerMarked)] == ["b"]
    assert simulation.fact(f.RunResumed).from_segment == simulation.record.commits[-1].segment
    differing(simulation, "b")
    assert [fact.worker_id for fact in simulation.facts(f.WorkerQuarantined)] == ["b"]
    simulation.complete()
    assert simulation.course == undisturbed(DATA_PARALLEL)
    assert "b" not in {name for _, _, names in simulation.computed[-3:] for name in names}
    # Without a majority nobody is to blame; the third time ends the run.
    tied = Computing()
    tied.come("abc")
    tied.tell(SubmitRun(RUN, verified({**DATA_PARALLEL, "num_replicas": 2}), 0.0))
    tied.until(f.ModelBuilt)
    for _ in range(2):
        differing(tied)
        assert tied.phase is not RunPhase.FAILED
    differing(tied)
    assert (tied.record.ended, tied.record.reason) == (RunPhase.FAILED, "they differ")
    assert not tied.facts(f.WorkerMarked)


def begun(text: str, *workers: str, disturb: Disturb = nobody) -> Computing:
    simulation = Computing(disturb=disturb)
    simulation.come(workers)
    simulation.tell(SubmitRun(RUN, text, 0.0))
    return simulation


KEPT = {**DATA_PARALLEL, "options": {"local_steps": 5, "upload_every": 4}}
"""Of four commits only the last is whole; of the others the workers have parts alone."""


def test_a_lost_verifier_of_which_parts_were_kept_is_replaced_once() -> None:
    simulation = begun(verified(KEPT), *"abcdefg")
    simulation.until(f.MembersFormed, 2)
    while not [fact for fact in simulation.facts(f.SegmentCommitted) if fact.party]:
        simulation.step()
    simulation.lose("d")
    formed = [fact.members[0].worker_id for fact in simulation.facts(f.MembersFormed) if fact.party]
    assert formed == ["d", "e"]
    simulation.complete()
    assert simulation.course == undisturbed(KEPT)
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)] == [4]


def test_a_commit_that_was_whole_only_later_is_verified_with_the_next_one() -> None:
    simulation = begun(
        verified(KEPT), *"abcdefg", disturb=lambda names, k, _: "!" * ("a" in names and k == 1)
    )
    simulation.until(f.SegmentCommitted)
    simulation.tell(DrainWorker(member("c")))
    simulation.until(f.CommitUploaded)
    simulation.complete()
    assert simulation.fact(f.SegmentRefuted).quarantined == ("a",)
    assert simulation.fact(f.RunResumed).from_segment == 0
    assert simulation.course == undisturbed(KEPT)


def test_a_verifier_that_trains_ahead_of_its_commits_is_named_for_each_segment() -> None:
    simulation = begun(verified(), *"ab")
    while simulation.queue:
        trained = [each for each in simulation.queue if isinstance(each.fact, f.SegmentFinished)]
        report = trained[0] if trained else simulation.queue[0]
        simulation.queue.remove(report)
        simulation.tell(report)
    verified_by = [fact.workers for fact in simulation.facts(f.SegmentVerified)]
    assert verified_by == [("b",)] * 4


def test_a_verifier_that_becomes_a_member_verifies_no_more() -> None:
    """Nor does it count as a part of what its successor computes."""
    simulation = begun(verified(), "a", "b", disturb=always("b"))
    simulation.until(f.SegmentCommitted)
    while not simulation.facts(f.SegmentVerified):  # the run's own party is slow
        late = [each for each in simulation.queue if not getattr(each.fact, "party", "")]
        simulation.queue = deque(each for each in simulation.queue if each not in late)
        simulation.step()
        simulation.queue.extend(late)
    simulation.lose("a")
    simulation.queue.clear()
    simulation.crash()
    simulation.until(f.SegmentCommitted, 3)
    simulation.come("c")
    simulation.complete()
    assert simulation.fact(f.SegmentRefuted).conclusion is Conclusion.OPEN
    assert not simulation.facts(f.WorkerQuarantined)


def test_the_last_commit_of_a_run_that_stops_early_is_verified_too() -> None:
    """Its workers upload the parts that they have kept, and so does the verifier."""
    stop = {"split": "test", "metrics": ["accuracy"], "best": "accuracy", "mode": "min"}
    changes: dict[str, Any] = {"evaluation": {**stop, "every": "5 steps", "stop": {"patience": 2}}}
    wrong, right = (
        run(verified(KEPT, **changes), *"abcdefg", disturb=disturb)
        for disturb in (always("a", segment=3), nobody)
    )
    assert wrong.fact(f.SegmentRefuted).quarantined == ("a",)
    assert wrong.course == right.course
    assert right.fact(f.StoppedEarly).step == 15
    assert [fact.segment for fact in right.facts(f.SegmentVerified)] == [3]
    # What a verifier uploads that is wrong itself is no commit of the run.
    simulation = run(verified(KEPT, **changes), *"abcdefg", disturb=always("d", segment=3))
    assert simulation.fact(f.SegmentRefuted).conclusion is Conclusion.VERIFIER
    assert simulation.course == right.course


def test_a_verifier_that_stops_before_the_run_did_gives_up() -> None:
    """The states are equal, and the metrics are not, as where somebody evaluates wrongly."""
    stop = {"split": "test", "metrics": ["accuracy"], "best": "accuracy", "every": "5 steps"}
    simulation = begun(verified(evaluation={**stop, "stop": {"patience": 2}}), "a", "b")
    while simulation.queue:
        report = simulation.queue.popleft()
        fact = report.fact
        if isinstance(fact, f.SegmentFinished) and fact.party:  # it improves no more
            fact = fact.model_copy(update={"metrics": {**fact.metrics, "test.accuracy": 0.0}})
        simulation.tell(Report(RUN, fact))
    assert simulation.record.ended is RunPhase.COMPLETED
    assert "metrics differ" in simulation.facts(f.PartyFailed)[-1].reason
    assert simulation.record.reason == "20 steps committed"
    assert simulation.status.extra["verification"] == "3 of 4 chosen segments verified"


def test_what_differed_is_not_forgotten_when_a_later_execution_fails() -> None:
    simulation = begun(verified(), *"abcd", disturb=always("a"))
    simulation.now_s = 5.0
    while not any(names == {"a"} for _, names in simulation.verifying()):
        simulation.step()
    simulation.report(f.PartyFailed(party=VERIFIER, reason="it cannot execute this alone"))
    assert simulation.fact(f.SegmentRefuted).conclusion is Conclusion.RUN
    assert [fact.worker_id for fact in simulation.facts(f.WorkerMarked)] == ["a"]
    simulation.complete()
    assert simulation.facts(f.WorkerQuarantined)[0].worker_id == "a"
    assert simulation.course == undisturbed(LOCAL)
    undecided = begun(verified(), *"abcd", disturb=always("a"))
    while (2, frozenset("c")) not in undecided.verifying():
        undecided.step()
    undecided.report(f.PartyFailed(party=VERIFIER, reason="its code raised"))
    assert undecided.fact(f.SegmentRefuted).conclusion is Conclusion.OPEN
    assert not undecided.record.is_reproducible


def test_a_run_stopped_before_its_return_returns_when_it_is_resumed() -> None:
    """As where the coordinator ends between the two facts, and a person stops the run then."""
    simulation = run(verified(), *"abcd", disturb=always("a"))
    kinds = simulation.kinds()
    simulation.journal = simulation.journal[: kinds.index("RunResumed")]
    simulation.keys.clear()
    simulation.stored |= {fact.digest for fact in simulation.facts(f.SegmentCommitted)}
    simulation.crash(is_twin=False)
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    assert [fact.from_segment for fact in simulation.facts(f.RunResumed)] == [None, 1]
    simulation.complete()
    assert simulation.course == undisturbed(LOCAL)


def test_replicas_may_differ_again_after_a_commit() -> None:
    simulation = begun(verified({**DATA_PARALLEL, "num_replicas": 2}), *"abc")
    for number in range(1, 4):
        simulation.until(f.SegmentCommitted, number)
        differing(simulation)
        simulation.crash()
    simulation.complete()
    assert simulation.course == undisturbed(DATA_PARALLEL)
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)] == [1, 2, 3, 4]


def test_a_run_that_is_trained_says_that_it_is_verified() -> None:
    simulation = begun(verified(placement_timeout_s=10.0), "a", "b")
    while len(simulation.record.commits) < 5:
        simulation.step()
    status = simulation.status
    assert (status.phase, status.strategy_phase) == (RunPhase.RUNNING, "VERIFYING")
    assert status.reason == "all is trained; the run ends when segment 4 is verified"
    assert (status.step, status.num_steps) == (20, 20)
    simulation.lose("a")
    simulation.tick(60.0)
    assert simulation.record.ended is None
    simulation.complete()
    assert "," not in simulation.status.extra["verification"]


def test_a_worker_that_the_run_alone_has_had_is_spare() -> None:
    simulation = begun(verified(), *"abc")
    simulation.until(f.SegmentCommitted)
    simulation.lose("a")  # "c" goes on, so that "a" is free when it is back
    simulation.come("a")
    simulation.until(f.SegmentVerified, 2)
    simulation.lose("b")
    simulation.complete()
    assert simulation.verifying()[-1] == (4, frozenset("a"))
    assert simulation.record.value.held == frozenset()


@pytest.mark.parametrize("num_before", [0, 8, 12, 16])
def test_two_runs_blame_the_same_worker_once_and_nobody_else(num_before: int) -> None:
    """Members of one are a, b and c, and those of the other a, d and e, of which some verify."""
    simulation = Computing(disturb=always("a"))
    simulation.come("abcde")
    text = verified(DATA_PARALLEL, on="any")
    simulation.tell(SubmitRun(RUN, text, 0.0))
    simulation.go_on(num_before)
    simulation.tell(SubmitRun(RunId("other"), text, 0.0))
    simulation.complete()
    assert simulation.course == undisturbed(DATA_PARALLEL)
    refuted = [fact.quarantined for fact in simulation.facts(f.SegmentRefuted)]
    assert refuted == [("a",), ("a",)]
    assert [fact.worker_id for fact in simulation.facts(f.WorkerQuarantined)] == ["a"]
    assert not simulation.facts(f.WorkerMarked)


@pytest.mark.parametrize("on", ["spare", "any"])
def test_a_worker_of_another_run_is_not_spare(on: str) -> None:
    simulation = Computing()
    simulation.come("ab")
    other = RunId("other")
    simulation.tell(SubmitRun(other, job_text(LOCAL), 0.0))
    simulation.tell(SubmitRun(RUN, verified(on=on), 0.0))
    while simulation.queue:
        report = simulation.queue.popleft()
        if report.run_id == RUN:  # the other run is slow
            simulation.tell(report)
    assert simulation.record.ended is RunPhase.COMPLETED
    segments = [fact.segment for fact in simulation.facts(f.SegmentVerified)]
    assert segments == ([1, 2, 3, 4] if on == "any" else [])
    formed = [fact.members for fact in simulation.facts(f.MembersFormed) if fact.party == VERIFIER]
    assert any(formed) == (on == "any")


def test_a_member_that_has_not_computed_a_segment_is_not_spare_either() -> None:
    simulation = begun(verified(), "a")
    simulation.until(f.SegmentCommitted, 2)
    simulation.lose("a")
    simulation.come("b")
    simulation.complete()
    assert not simulation.verifying()
    assert simulation.status.extra["verification"] == "0 of 4 chosen segments verified"


def test_a_worker_that_has_computed_a_segment_does_not_decide_about_it_if_others_can() -> None:
    simulation = begun(verified(), *"abcd", disturb=always("a"))
    simulation.until(f.SegmentCommitted, 3)
    simulation.lose("a")
    simulation.come("a", 1)
    simulation.complete()
    assert simulation.fact(f.SegmentRefuted).workers[:3] == (("a",), ("b",), ("d",))


def test_former_members_are_spare_workers_again() -> None:
    simulation = Computing()
    simulation.come("abcdef")
    simulation.tell(SubmitRun(RUN, verified({**DATA_PARALLEL, "num_replicas": 4}), 0.0))
    simulation.until(f.ModelBuilt)
    differing(simulation, "b")
    simulation.complete()
    trainers = [names for party, _, names in simulation.computed if not party]
    assert len(trainers[0] | trainers[-1]) == 6
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)] == [1, 2, 3, 4]


def test_a_segment_that_nobody_can_verify_does_not_keep_others_from_it() -> None:
    simulation = Computing()
    simulation.come("abc")
    simulation.tell(SubmitRun(RUN, verified({**DATA_PARALLEL, "num_replicas": 2}), 0.0))
    simulation.until(f.ModelBuilt)
    simulation.queue = deque()  # what the members compute is lost with one of them
    simulation.lose("a")
    simulation.come("a")
    simulation.run()
    assert simulation.record.ended is RunPhase.COMPLETED
    assert simulation.course == undisturbed({**DATA_PARALLEL, "num_replicas": 2})
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)] == [2, 3, 4]
    assert {name for _, names in simulation.verifying() for name in names} == {"a"}
    assert simulation.status.extra["verification"] == "3 of 4 chosen segments verified"


def test_a_difference_waits_for_a_worker_that_can_decide_while_the_run_goes_on() -> None:
    """Checks that wait behind it do not end it: of what follows a wrong state nothing is right."""
    simulation = begun(verified(steps=60, epochs=None), "a", "b", disturb=always("a"))
    while not (simulation.record.value.checks and simulation.record.value.checks[0].executions):
        simulation.step()
    simulation.lose("a")
    while len(simulation.record.value.checks) < 2:
        simulation.step()
    simulation.go_on(4)
    assert simulation.record.ended is None
    assert not simulation.facts(f.SegmentRefuted)
    simulation.come("c")
    simulation.complete()
    assert simulation.fact(f.SegmentRefuted).conclusion is Conclusion.RUN
    assert simulation.record.is_reproducible


def failing(simulation: Simulation) -> None:
    """The code of the run's own party raises in the segment that it trains."""
    simulation.queue = deque()
    simulation.tell(Report(RUN, f.PartyFailed(party=f.ROOT, reason="the loss is not finite")))


def test_what_has_failed_is_repeated_from_a_state_that_is_verified_and_then_by_others() -> None:
    simulation = Computing()
    simulation.come("abc")
    simulation.tell(SubmitRun(RUN, verified(), 0.0))
    for segment in (1, 2):
        simulation.until(f.SegmentVerified, segment)
        failing(simulation)
        resumed = simulation.facts(f.RunResumed)[-1]
        assert (resumed.from_segment, resumed.reason) == (segment, "the loss is not finite")
    simulation.crash()
    # Twice by the same worker: another one trains, and what fails there fails everywhere.
    assert nested.workers(simulation.record.value.main) == {"a"}
    failing(simulation)
    assert nested.workers(simulation.record.value.main) == {"b"}
    failing(simulation)
    assert (simulation.record.ended, simulation.record.reason) == (
        RunPhase.FAILED,
        "the loss is not finite",
    )
    # A user who resumes the run has it repeated again.
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    failing(simulation)
    simulation.complete()
    assert simulation.course == undisturbed(LOCAL)
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)][-2:] == [3, 4]


def held_back(simulation: Computing) -> list[Report]:
    """Let all happen but what the verifier reports, which is returned."""
    reports: list[Report] = []
    while simulation.queue:
        report = simulation.queue.popleft()
        if getattr(report.fact, "party", "") == VERIFIER:
            reports.append(report)
        else:
            simulation.tell(report)
    return reports


def test_a_difference_at_the_end_that_nobody_can_decide_leaves_it_open() -> None:
    simulation = begun(verified(), *"ab", disturb=always("b", segment=4))
    reports = held_back(simulation)
    simulation.queue.extend(reports)
    simulation.lose("a")
    simulation.complete()
    assert simulation.fact(f.SegmentRefuted).conclusion is Conclusion.OPEN
    assert simulation.course == undisturbed(LOCAL)


def test_a_verifier_that_leaves_is_replaced() -> None:
    simulation = begun(verified(), *"abc")
    while not simulation.verifying():
        simulation.step()
    simulation.tell(LeaveWorker(member("b"), "asked to"))
    simulation.complete()
    assert {name for _, names in simulation.verifying()[1:] for name in names} == {"c"}


def test_a_failure_before_there_is_a_state_ends_the_run() -> None:
    simulation = begun(verified(), "a")
    failing(simulation)
    assert simulation.record.ended is RunPhase.FAILED
    raising_run = start(job_text(LOCAL), "a", strategies=raising("own_failure"))
    failing(raising_run)
    assert raising_run.record.reason.startswith("the strategy raised ")


def test_a_run_resumed_before_what_was_checked_is_checked_again() -> None:
    simulation = begun(verified(retention=8), *"abc")
    simulation.until(f.SegmentVerified, 3)
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN, from_segment=1))
    simulation.complete()
    assert simulation.course[-2:] == undisturbed(LOCAL)[-2:]
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)][3:] == [2, 3, 4]


def test_of_many_checks_that_wait_the_oldest_is_given_up() -> None:
    simulation = begun(verified(sample=0.4, steps=200, epochs=None), *"abc")
    reports = held_back(simulation)
    assert len(simulation.record.value.checks) == 3
    num_missed = simulation.record.value.counts.missed
    assert num_missed > 0
    simulation.queue.extend(reports)
    simulation.complete()
    assert simulation.record.value.counts.missed == num_missed
    assert simulation.status.extra["verification"] == "12 of 24 chosen segments verified"


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        (
            {"conclusion": "RUN", "digests": ("1", "2"), "workers": (("a",), ("b",))},
            "segment 3 computed by a differs from that by b: the run was wrong and returns to the "
            "state before it; quarantined: a",
        ),
        (
            {"conclusion": "JOB", "workers": (("a", "b"),)},
            "segment 3 was computed wrongly: the replicas of its members differ: the job does not "
            "repeat itself, and is verified no more",
        ),
    ],
)
def test_a_refutation_says_what_is_known(fact: dict[str, Any], expected: str) -> None:
    quarantined = ("a",) if fact["conclusion"] == "RUN" else ()
    known: dict[str, Any] = {"party": f.ROOT, "segment": 3, "step": 15, "quarantined": quarantined}
    assert sentence(f.SegmentRefuted(**known, **fact)) == expected
    marked = f.SegmentRefuted(**{**known, **fact, "quarantined": (), "marked": ("a",)})
    assert sentence(marked).endswith("a may have been wrong once")


def test_a_verification_is_recorded_once_its_run_has_ended() -> None:
    result = f.VerificationEnded(
        run_id=RUN,
        conclusion=Conclusion.EQUAL,
        num_equal=7,
        num_unverified=0,
        workers=(WorkerId("b"),),
        wall_s=9.0,
    )
    simulation = begun(verified(), *"ab")
    refusal = simulation.refusal(RecordVerification(result))
    assert refusal.reason == "run 'run-1' is active; it is verified at its end"
    simulation.complete()
    simulation.tell(RecordVerification(result))
    assert simulation.state.verifications == {RUN: result}
    unknown = result.model_copy(update={"run_id": RunId("other")})
    assert simulation.refusal(RecordVerification(unknown)).reason == "run 'other' is not known"


def test_a_segment_is_repeated_a_few_times_at_most() -> None:
    """Its worker is wrong each time but fails when it is alone, so nothing is known of it."""

    def wrong(names: frozenset[str], segment: int, _number: int) -> str:
        return "!" * (segment == 2 and "a" in names)

    simulation = begun(verified({**DATA_PARALLEL, "num_replicas": 2}), *"abcd", disturb=wrong)
    while simulation.queue:
        report = simulation.queue.popleft()
        executed = [names for party, _, names in simulation.computed if party == VERIFIER]
        if getattr(report.fact, "party", "") == VERIFIER and executed[-1] == frozenset("a"):
            report = Report(RUN, f.PartyFailed(party=VERIFIER, reason="the loss is not finite"))
        simulation.tell(report)
    assert simulation.record.ended is RunPhase.COMPLETED
    conclusions = [fact.conclusion for fact in simulation.facts(f.SegmentRefuted)]
    assert conclusions == [Conclusion.RUN] * 3 + [Conclusion.OPEN]
    assert not simulation.record.is_reproducible

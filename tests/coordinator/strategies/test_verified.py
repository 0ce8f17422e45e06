"""Runs that are verified while they train, in the pure core: who verifies, and what follows."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from stratagem.common.base.ids import Digest, RunId, WorkerId
from stratagem.common.numerics.verification import VERIFIER, Conclusion
from stratagem.coordinator.core import effects as e
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import CancelRun, Report, ResumeRun, SubmitRun
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.state import RunPhase
from tests.coordinator.core.jobs import DATA_PARALLEL, GOSSIP, LOCAL, job_text
from tests.coordinator.core.simulation import RUN, Simulation, digest, do

pytestmark = pytest.mark.core

Disturb = Callable[[frozenset[str], int, int], str]
"""(workers, segment, number of the execution): text that is no part of the right state."""


def nobody(_workers: frozenset[str], _segment: int, _number: int) -> str:
    return ""


@dataclass
class Computing(Simulation):
    """A simulation whose states follow from the states before, as workers compute them."""

    disturb: Disturb = nobody
    states: dict[tuple[str, int], str] = field(default_factory=dict)
    """The state that each party holds after a segment."""
    computed: list[tuple[str, int, frozenset[str]]] = field(default_factory=list)
    """Party, segment and workers of each execution."""

    def _start(self) -> None:
        due = pending(self.state)
        for effect in sorted(due - self.seen, key=repr):
            self.queue.append(Report(effect.run_id, self._do(effect)))
        self.seen = set(due)

    def _do(self, effect: e.Effect) -> f.Fact:
        fact = do(effect)
        if isinstance(effect, e.RunSegment):
            names = frozenset(str(member.worker_id) for member in effect.members)
            number = sum(segment == effect.segment for _, segment, _ in self.computed)
            self.computed.append((effect.party, effect.segment, names))
            before = effect.base.digest[:40]
            if effect.base.segment + 1 != effect.segment:
                before = self.states[effect.party, effect.segment - 1]
            wrong = self.disturb(names, effect.segment, number)
            text = f"{before}/{effect.to_step}/{effect.num_skipped}{wrong}"
            self.states[effect.party, effect.segment] = digest(str(hash(text)))[:40]
        if isinstance(effect, e.CommitSegment):
            state = self.states[effect.party, effect.segment]
            return fact.model_copy(update={"digest": Digest(state.ljust(64, "0"))})
        return fact

    @property
    def course(self) -> list[tuple[int, Digest]]:
        """The segments and digests that the run has committed in the end."""
        return [(commit.segment, commit.digest) for commit in self.record.commits]

    def verifying(self) -> list[tuple[int, frozenset[str]]]:
        """What the verifier has executed, in order."""
        return [(segment, names) for party, segment, names in self.computed if party == VERIFIER]


def verified(strategy: dict[str, Any] = LOCAL, sample: float = 1.0, **changes: Any) -> str:
    sections = {"checkpoint": {"every": "5 steps"}, "seed": 7, "retention": 2, **changes}
    on = sections.pop("on", "spare")
    if sample:
        sections["verification"] = {"sample": sample, "on": on}
    return job_text(strategy, **sections)


def run(text: str, *workers: str, disturb: Disturb = nobody, crashes: bool = False) -> Computing:
    simulation = Computing(disturb=disturb)
    simulation.come(workers)
    simulation.tell(SubmitRun(RUN, text, 0.0))
    while simulation.queue:
        simulation.now_s += 1.0
        simulation.step()
        if crashes:
            simulation.crash()
    return simulation


def undisturbed(strategy: dict[str, Any]) -> list[tuple[int, Digest]]:
    return run(verified(strategy, 0.0), "a", "b", "c").course


def always(name: str) -> Disturb:
    """A worker that adds a bit to whatever it computes in segment 2."""
    return lambda names, segment, _number: "!" * (name in names and segment == 2)


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
    assert simulation.status.extra["verification"] == "4 chosen segments verified"
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


def test_without_a_worker_to_spare_the_run_ends_unverified() -> None:
    simulation = run(verified(), "a")
    assert simulation.course == undisturbed(LOCAL)
    reason = simulation.fact(f.RunCompleted).reason
    assert reason == "20 steps committed; 0 chosen segments verified, 4 not"
    assert run(verified(on="any"), "a").record.ended is RunPhase.COMPLETED
    # Its members change places instead, and a worker verifies what it has computed itself.
    first = run(verified(on="members"), "a", disturb=lambda _n, k, num: "!" * ((k, num) == (2, 0)))
    assert first.course == undisturbed(LOCAL)
    assert first.fact(f.SegmentRefuted).conclusion is Conclusion.RUN


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
    assert simulation.status.extra["verification"] == "3 chosen segments verified, 1 not"


def failing(simulation: Computing) -> None:
    """The code of the run's own party raises in the segment that it trains."""
    simulation.queue = deque()
    simulation.tell(Report(RUN, f.PartyFailed(party=f.ROOT, reason="the loss is not finite")))


def test_what_has_failed_is_repeated_once_from_a_state_that_is_verified() -> None:
    simulation = Computing()
    simulation.come("abc")
    simulation.tell(SubmitRun(RUN, verified(), 0.0))
    for segment in (1, 2):
        simulation.until(f.SegmentVerified, segment)
        failing(simulation)
        resumed = simulation.facts(f.RunResumed)[-1]
        assert (resumed.from_segment, resumed.reason) == (segment, "the loss is not finite")
    simulation.crash()
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

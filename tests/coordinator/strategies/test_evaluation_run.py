"""The life of a run that trains nothing, in the pure core: placement, loss, crash, stop."""

import pytest

from stratagem.coordinator.core.commands import CancelRun, LoseWorker, Report, ResumeRun
from stratagem.coordinator.core.effects import EvaluateState
from stratagem.coordinator.core.facts import (
    Evaluated,
    Member,
    MembersFormed,
    RunCompleted,
    SegmentFinished,
)
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.blob_owners import is_shared
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, pending
from stratagem.coordinator.core.strategy_contract import Status
from tests.coordinator.core.jobs import DATA_PARALLEL, evaluation_only
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    digest,
    do,
    ending,
    member,
    register,
    start,
)

pytestmark = pytest.mark.core

METRICS = {"test.loss": 0.1}


def evaluating(num_replicas: int = 3, **changes: object) -> str:
    return evaluation_only({**DATA_PARALLEL, "num_replicas": num_replicas}, **changes)


def status(simulation: Simulation) -> Status:
    run = simulation.state.runs[RUN]
    return run.strategy.status(run.job, run.value, world_of(simulation.state))


def effects(simulation: Simulation) -> list[EvaluateState]:
    return [each for each in pending(simulation.state) if isinstance(each, EvaluateState)]


def to_evaluation(simulation: Simulation) -> EvaluateState:
    """Until the model is built."""
    simulation.tell(simulation.queue.popleft())
    (effect,) = effects(simulation)
    return effect


def test_it_evaluates_once_and_completes() -> None:
    simulation = start(evaluating(), "a", "b")
    effect = to_evaluation(simulation)
    assert effect.members == (member("a"), member("b"))
    assert (effect.num_shards, effect.splits) == (3, ("test",))
    assert status(simulation).strategy_phase == "EVALUATING"
    assert status(simulation).num_steps == 7  # 20 rows, three at a time
    simulation.run()
    run = simulation.state.runs[RUN]
    assert (run.ended, run.reason) == (RunPhase.COMPLETED, "20 rows of test evaluated")
    assert run.metrics == METRICS
    assert [(commit.segment, commit.metrics) for commit in run.commits] == [(0, METRICS)]
    assert run.is_reproducible
    assert not simulation.facts(SegmentFinished)


def test_a_crash_after_any_command_changes_nothing() -> None:
    undisturbed = start(evaluating(), "a", "b")
    undisturbed.run()
    for crash_after in range(1, 6):
        simulation = start(evaluating(), "a", "b")
        for _ in range(crash_after):
            if simulation.queue:
                simulation.tell(simulation.queue.popleft())
        simulation.crash()
        simulation.run()
        assert simulation.facts(Evaluated) == undisturbed.facts(Evaluated)
        assert simulation.facts(RunCompleted) == undisturbed.facts(RunCompleted)


def test_others_take_the_shards_of_a_lost_worker_and_a_new_one_helps() -> None:
    simulation = start(evaluating(), "a", "b")
    base = to_evaluation(simulation).base
    simulation.tell(LoseWorker(member("a"), "gone"))
    (effect,) = effects(simulation)
    assert (effect.members, effect.base) == ((member("b"),), base)
    assert status(simulation).phase is RunPhase.RECOVERING
    simulation.tell(register("c"))
    assert effects(simulation)[0].members == (member("b"), member("c"))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_without_any_worker_it_waits_with_what_it_has() -> None:
    simulation = start(evaluating(), "a")
    to_evaluation(simulation)
    simulation.queue.clear()
    simulation.tell(LoseWorker(member("a"), "gone"))
    assert not effects(simulation)
    assert "no worker is available: a (gone)" in status(simulation).reason
    simulation.tell(register("b"))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED


def test_three_processes_that_end_inside_it_fail_the_run() -> None:
    simulation = start(evaluating(), "a")
    to_evaluation(simulation)
    simulation.queue.clear()
    for count in range(3):
        simulation.tell(register("a", count + 1, ending("a", count, status=-11)))
    run = simulation.state.runs[RUN]
    assert (run.ended, run.reason) == (
        RunPhase.FAILED,
        "the evaluation has ended 3 worker processes; the last one, a, ended by SIGSEGV",
    )


def test_stopped_it_can_go_on() -> None:
    simulation = start(evaluating(), "a")
    to_evaluation(simulation)
    simulation.queue.clear()
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN))
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    assert len(simulation.facts(MembersFormed)) == 2


def test_the_state_that_it_begins_from_is_kept() -> None:
    given = digest("given")
    simulation = start(evaluating(initial={"digest": given}), "a")
    assert given in live_blobs(simulation.state)


def test_the_predictions_of_a_run_are_kept_as_long_as_it() -> None:
    simulation = start(evaluating(evaluation={"split": "test", "predictions": True}), "a")
    (evaluated,) = do(to_evaluation(simulation))
    simulation.queue.clear()
    told = evaluated.model_copy(update={"predictions": digest("predictions")})
    simulation.tell(Report(RUN, told))
    simulation.run()
    run = simulation.state.runs[RUN]
    assert (run.ended, run.predictions) == (RunPhase.COMPLETED, digest("predictions"))
    assert digest("predictions") in live_blobs(simulation.state)
    assert is_shared(simulation.state, digest("predictions"))


@pytest.mark.parametrize(("workers", "alone"), [("a", member("a")), ("ab", None)])
def test_only_who_evaluates_alone_is_the_one_that_does(workers: str, alone: Member | None) -> None:
    assert to_evaluation(start(evaluating(), *workers)).member == alone

"""Training that ends before its last step, because an evaluation or the user's code says so."""

from collections.abc import Mapping
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import CancelRun, LoseWorker, ResumeRun
from stratagem.coordinator.core.facts import (
    RunCompleted,
    SegmentCommitted,
    SegmentFinished,
    StoppedEarly,
)
from stratagem.coordinator.core.metric_course import why_stopped, with_course
from stratagem.coordinator.core.state import RunPhase
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    FEDERATED,
    GOSSIP,
    LOCAL,
    POPULATION_SECTIONS,
    check_at_submit,
    job_text,
    population,
    silos,
)
from tests.coordinator.core.simulation import (
    RUN,
    member,
    phase,
    reason,
    register,
    start,
)

pytestmark = pytest.mark.core

STOP = {"patience": 2}


def stopping(strategy: dict[str, Any], **stop: object) -> str:
    """A job whose metric never improves after the first evaluation: accuracy rises and is to fall;
    under Federated the loss stays."""
    if strategy["type"] == "Federated":
        evaluation = {"split": "test", "best": "loss", "mode": "min"}
        return job_text({**strategy, "rounds": 9}, evaluation={**evaluation, "stop": STOP | stop})
    evaluation = {"split": "test", "best": "accuracy", "mode": "min"}
    measured = {"metrics": ["accuracy"], "stop": STOP | stop}
    sections: dict[str, Any] = {"epochs": 9, "checkpoint": {"every": "5 steps"}}
    return job_text(strategy, evaluation={**evaluation, **measured}, **sections)


STRATEGIES = [LOCAL, DATA_PARALLEL, GOSSIP, FEDERATED, silos(2)]
NAMES = ["Local", "DataParallel", "Gossip", "Federated", "silos"]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
def test_a_run_stops_when_its_metric_has_not_improved(strategy: dict[str, Any]) -> None:
    simulation = start(stopping(strategy), *"abcd")
    simulation.run()
    run = simulation.state.runs[RUN]
    (fact,) = simulation.facts(StoppedEarly)
    assert run.ended is RunPhase.COMPLETED
    assert run.reason == fact.reason
    steps = "3 rounds" if strategy["type"] == "Federated" else "30 steps"
    metric = "test.loss" if strategy["type"] == "Federated" else "test.accuracy"
    best = "0.1" if strategy["type"] == "Federated" else "0.01"
    assert fact.reason == (
        f"stopped early after {steps}: {metric} has not improved in 2 evaluations; "
        f"its best is {best}"
    )
    assert fact.step == run.commits[-1].step == (3 if "rounds" in steps else 30)
    assert run.commits[-1].metrics["stop.evaluations_without_improvement"] == 2
    assert not simulation.facts(RunCompleted)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
def test_a_crash_around_the_stop_changes_nothing(strategy: dict[str, Any]) -> None:
    undisturbed = start(stopping(strategy), *"abcd")
    undisturbed.run()
    expected = undisturbed.facts(SegmentCommitted), undisturbed.facts(StoppedEarly)
    for crash_after in range(1, 60):
        simulation = start(stopping(strategy), *"abcd")
        for _ in range(crash_after):
            if simulation.queue:
                simulation.tell(simulation.queue.popleft())
        simulation.crash()
        simulation.run()
        assert (simulation.facts(SegmentCommitted), simulation.facts(StoppedEarly)) == expected


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP], ids=NAMES[:3])
def test_all_workers_lost_around_the_stop_changes_nothing(strategy: dict[str, Any]) -> None:
    """The party returns to its last commit, and what it has counted since with it."""
    undisturbed = start(stopping(strategy), "a")
    undisturbed.run()
    for lost_after in range(1, 11):
        simulation = start(stopping(strategy), "a")
        for _ in range(lost_after):
            simulation.tell(simulation.queue.popleft())
        simulation.queue.clear()
        simulation.tell(LoseWorker(member("a"), "gone"))
        simulation.crash()
        simulation.tell(register("a", 1))
        simulation.run()
        assert simulation.facts(SegmentCommitted) == undisturbed.facts(SegmentCommitted)
        assert simulation.facts(StoppedEarly) == undisturbed.facts(StoppedEarly)


@pytest.mark.parametrize("strategy", [LOCAL, FEDERATED], ids=["Local", "Federated"])
def test_a_run_that_goes_back_counts_on_from_that_commit(strategy: dict[str, Any]) -> None:
    undisturbed = start(stopping(strategy, patience=3), *"abcd")
    undisturbed.run()
    simulation = start(stopping(strategy, patience=3), *"abcd")
    wanted = 2 if strategy is FEDERATED else 4
    while len(simulation.facts(SegmentCommitted)) < wanted + 1:
        simulation.tell(simulation.queue.popleft())
    simulation.tell(CancelRun(RUN, "me"))
    simulation.run()
    simulation.tell(ResumeRun(RUN, "me", from_segment=wanted))
    simulation.run()
    assert simulation.facts(StoppedEarly) == undisturbed.facts(StoppedEarly)
    assert simulation.state.runs[RUN].commits[-1] == undisturbed.state.runs[RUN].commits[-1]


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP], ids=NAMES[:3])
def test_a_worker_may_ask_for_the_end_within_a_segment(strategy: dict[str, Any]) -> None:
    simulation = start(job_text(strategy), "a")
    while not isinstance(simulation.queue[0].fact, SegmentFinished):
        simulation.tell(simulation.queue.popleft())
    report = simulation.queue.popleft()
    asked = report.fact.model_copy(update={"step": 4, "stop_reason": "a callback has asked for it"})
    simulation.tell(type(report)(report.run_id, asked))
    assert reason(simulation) or phase(simulation) is RunPhase.RUNNING
    simulation.crash()
    simulation.run()
    (fact,) = simulation.facts(StoppedEarly)
    assert fact.reason == "stopped early after 4 steps: a callback has asked for it"
    (commit,) = simulation.facts(SegmentCommitted)
    assert commit.step == 4


def test_the_last_step_is_no_early_stop() -> None:
    simulation = start(stopping(LOCAL, patience=8), "a")
    simulation.run()
    assert not simulation.facts(StoppedEarly)
    assert [fact.reason for fact in simulation.facts(RunCompleted)] == ["90 steps committed"]


def course(values: list[float], **stop: object) -> list[str]:
    """Why a job stops, after each of these values of its loss."""
    best = {"split": "test", "best": "loss", "mode": "min"}
    text = job_text(LOCAL, evaluation={**best, "stop": {"patience": 2, **stop}})
    job, reasons = JobSpec.from_json(text), []
    metrics: Mapping[str, float] = {}
    for value in values:
        metrics = with_course(job, metrics, {"test.loss": value})
        reasons.append(why_stopped(job, metrics))
        metrics = with_course(job, metrics, {})
    return reasons


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "stop", "num"),
    [
        ([3.0, 2.0, 1.0, 0.5], {}, None),
        ([3.0, 3.0, 3.0], {}, 3),
        ([3.0, 3.5, 2.9, 3.0, 2.95], {}, 5),
        ([3.0, 2.5, 2.2, 1.9, 1.8], {"min_delta": 1.0}, 3),
        ([3.0, 2.5, 1.9, 1.8, 1.7], {"min_delta": 1.0}, 5),
        ([NAN, NAN, 1.0], {}, 2),
        ([1.0, NAN, 0.5, NAN, NAN], {}, 5),
        ([1.0, 2.0, 3.0], {"metric": "loss", "mode": "max"}, None),
    ],
)
def test_the_count_of_evaluations(
    values: list[float], stop: dict[str, Any], num: int | None
) -> None:
    stopped = [number for number, why in enumerate(course(values, **stop), 1) if why]
    assert (stopped[0] if stopped else None) == num


def test_whoever_goes_on_after_a_stop_is_given_its_patience_again() -> None:
    assert [bool(why) for why in course([1.0, 1.0, 1.0, 1.0, 1.0])] == [0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (stopping(LOCAL, metric="f1"), "evaluation.stop.metric: 'f1' is not measured"),
        (stopping(LOCAL, metric="loss"), "evaluation.stop.mode: missing; max or min"),
        (stopping(LOCAL, patience=0), "evaluation.stop.patience"),
        (
            job_text(LOCAL, evaluation={"split": "test", "stop": STOP}),
            "evaluation.stop.metric: missing; evaluation.best, its default, is not set",
        ),
        (
            job_text(
                population(),
                **{
                    **POPULATION_SECTIONS,
                    "evaluation": {**POPULATION_SECTIONS["evaluation"], "stop": STOP},
                },
            ),
            "evaluation.stop: is not allowed with strategy PopulationBased",
        ),
    ],
)
def test_a_stop_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_at_submit(text)
    assert said in str(refused.value)

"""Training that ends before its last step, because an evaluation or the user's code says so."""

from collections.abc import Mapping
from typing import Any

import pytest

from stratagem.common.job import JobSpec
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import CancelRun, ResumeRun
from stratagem.coordinator.core.courses import why_stopped, with_course
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    FEDERATED,
    GOSSIP,
    LOCAL,
    POPULATION_SECTIONS,
    job_text,
    population,
    refusal,
    silos,
    stopping,
)
from tests.coordinator.core.simulation import RUN, start

pytestmark = pytest.mark.core


STOP = {"patience": 2}
STRATEGIES = [LOCAL, DATA_PARALLEL, GOSSIP, FEDERATED, silos(2)]
NAMES = ["Local", "DataParallel", "Gossip", "Federated", "silos"]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
def test_a_run_stops_when_its_metric_has_not_improved(strategy: dict[str, Any]) -> None:
    simulation = start(stopping(strategy), *"abcd")
    simulation.complete()
    run, fact = simulation.record, simulation.fact(f.StoppedEarly)
    steps, metric, best = ("30 steps", "test.accuracy", "0.01")
    if strategy["type"] == "Federated":
        steps, metric, best = ("3 rounds", "test.loss", "0.1")
    assert (
        run.reason
        == fact.reason
        == (
            f"stopped early after {steps}: {metric} has not improved in 2 evaluations; "
            f"its best is {best}"
        )
    )
    assert fact.step == run.commits[-1].step == (3 if "rounds" in steps else 30)
    assert run.commits[-1].metrics["stop.evaluations_without_improvement"] == 2
    assert not simulation.facts(f.RunCompleted)


@pytest.mark.parametrize("strategy", [LOCAL, FEDERATED], ids=["Local", "Federated"])
def test_a_run_that_goes_back_counts_on_from_that_commit(strategy: dict[str, Any]) -> None:
    undisturbed = start(stopping(strategy, patience=3), *"abcd")
    undisturbed.run()
    simulation = start(stopping(strategy, patience=3), *"abcd")
    wanted = 2 if strategy is FEDERATED else 4
    simulation.until(f.SegmentCommitted, wanted + 1)
    simulation.tell(CancelRun(RUN, "me"))
    simulation.run()
    simulation.tell(ResumeRun(RUN, "me", from_segment=wanted))
    simulation.run()
    assert simulation.facts(f.StoppedEarly) == undisturbed.facts(f.StoppedEarly)
    assert simulation.record.commits[-1] == undisturbed.record.commits[-1]


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP], ids=NAMES[:3])
def test_a_worker_may_ask_for_the_end_within_a_segment(strategy: dict[str, Any]) -> None:
    simulation = start(job_text(strategy), "a")
    while not isinstance(simulation.queue[0].fact, f.SegmentFinished):
        simulation.step()
    report = simulation.queue.popleft()
    asked = report.fact.model_copy(update={"step": 4, "stop_reason": "a callback has asked for it"})
    simulation.tell(type(report)(report.run_id, asked))
    assert simulation.reason or simulation.phase is RunPhase.RUNNING
    simulation.crash()
    simulation.run()
    fact = simulation.fact(f.StoppedEarly)
    assert fact.reason == "stopped early after 4 steps: a callback has asked for it"
    commit = simulation.fact(f.SegmentCommitted)
    assert commit.step == 4


def test_the_last_step_is_no_early_stop() -> None:
    simulation = start(stopping(LOCAL, patience=8), "a")
    simulation.run()
    assert not simulation.facts(f.StoppedEarly)
    assert [fact.reason for fact in simulation.facts(f.RunCompleted)] == ["90 steps committed"]


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


IN_GENERATIONS = {**POPULATION_SECTIONS["evaluation"], "stop": STOP}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (stopping(LOCAL, metric="f1"), "evaluation.stop.metric: 'f1' is not measured"),
        (stopping(LOCAL, metric="loss"), "evaluation.stop.mode: missing; max or min"),
        (stopping(LOCAL, patience=0), "evaluation.stop.patience"),
        (
            job_text(LOCAL, evaluation={"split": "test", "stop": STOP}),
            "evaluation.stop.metric: missing; evaluation.best, its",
        ),
        (
            job_text(population(), **{**POPULATION_SECTIONS, "evaluation": IN_GENERATIONS}),
            "evaluation.stop: is not allowed with strategy PopulationBased",
        ),
    ],
)
def test_a_stop_that_cannot_be_is_refused(text: str, said: str) -> None:
    assert said in refusal(text)

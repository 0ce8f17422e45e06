"""Runs that go on from a commit of another run, with its step."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import RunSegment, TrainClient
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    ModelBuilt,
    SegmentCommitted,
    StoppedEarly,
)
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.strategies.client_parties.silos import client_job
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    FEDERATED,
    GOSSIP,
    LOCAL,
    evaluation_only,
    job_text,
    population,
    silos,
)
from tests.coordinator.core.simulation import RUN, Simulation, digest, start

pytestmark = pytest.mark.core

COUNTED = {"stop.best": 0.05, "stop.evaluations_without_improvement": 1.0, SKIPPED_STEPS: 3.0}


def initial(step: int, **metrics: float) -> dict[str, Any]:
    found = {"digest": digest("old"), "resume": True, "step": step}
    return {**found, "metrics": metrics} if metrics else found


def resumed(text: str, segment: int, step: int) -> Simulation:
    """Until the model is built, as the effect reports it for such a job."""
    simulation = start(text, *"abc")
    while not isinstance(simulation.queue[0].fact, ModelBuilt):
        simulation.tell(simulation.queue.popleft())
    report = simulation.queue.popleft()
    named = {"digest": digest("old"), "segment": segment, "step": step}
    built = report.fact.model_copy(update=named)
    simulation.tell(type(report)(report.run_id, built))
    return simulation


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP], ids=["Local", "DP", "Gossip"])
def test_segments_are_those_after_the_step(strategy: dict[str, Any]) -> None:
    text = job_text(strategy, initial=initial(13, **COUNTED), checkpoint={"every": "4 steps"})
    simulation = resumed(text, 0, 13)
    (effect,) = (each for each in pending(simulation.state) if isinstance(each, RunSegment))
    assert (effect.base.step, effect.base.digest, effect.to_step) == (13, digest("old"), 16)
    assert effect.num_skipped == 3
    simulation.crash()
    simulation.run()
    assert [fact.step for fact in simulation.facts(SegmentCommitted)] == [16, 20]
    run = simulation.state.runs[RUN]
    assert (run.commits[0].step, run.commits[0].metrics) == (13, COUNTED)
    assert run.reason == "20 steps committed"


def test_what_was_counted_goes_on() -> None:
    """One evaluation without an improvement is behind the commit, so that one more ends it."""
    stop = {"split": "test", "metrics": ["accuracy"], "best": "accuracy", "mode": "min"}
    evaluation = {**stop, "every": "5 steps", "stop": {"patience": 2}}
    text = job_text(LOCAL, initial=initial(55, **COUNTED), evaluation=evaluation, epochs=9)
    simulation = resumed(text, 0, 55)
    simulation.run()
    assert [fact.step for fact in simulation.facts(StoppedEarly)] == [60]


@pytest.mark.parametrize("strategy", [FEDERATED, silos(2)], ids=["Federated", "silos"])
def test_rounds_keep_their_numbers(strategy: dict[str, Any]) -> None:
    simulation = resumed(job_text({**strategy, "rounds": 7}, initial=initial(4, **COUNTED)), 4, 4)
    for each in pending(simulation.state):
        if isinstance(each, TrainClient):
            assert (each.round_num, each.base.digest) == (5, digest("old"))
    simulation.run()
    assert [f.segment for f in simulation.facts(SegmentCommitted) if not f.party] == [5, 6, 7]
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    assert (run.commits[0].segment, run.commits[0].metrics) == (4, COUNTED)


def test_a_silo_knows_nothing_of_it() -> None:
    plain = job_text(silos(2), initial={"digest": digest("old")})
    assert client_job(JobSpec.from_json(plain), 0, 1).initial is not None
    text = job_text(silos(2), initial=initial(2))
    assert client_job(JobSpec.from_json(text), 0, 1).initial is None


YOGI = {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.01}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (job_text(LOCAL, initial={"digest": digest("o"), "resume": True}), "initial.step: missing"),
        (
            job_text(LOCAL, initial={"file": "a.safetensors", "resume": True}),
            "initial.resume: is",
        ),
        (job_text(LOCAL, initial={"digest": digest("old"), "step": 3}), "initial.step: has a mean"),
        (job_text(LOCAL, initial={"run": "old", "metrics": {}}), "initial.metrics: has a meaning"),
        (job_text(LOCAL, initial=initial(9), epochs=None, steps=9), "steps: 9 must be more than"),
        (
            job_text(LOCAL, initial={**initial(1), "metrics": {"stop.best": "x"}}),
            "initial.metrics: stop.best is 'x', not a number",
        ),
        (job_text(FEDERATED, initial=initial(3)), "strategy.rounds: 3 must be more than the 3"),
        (job_text({**FEDERATED, "aggregation": YOGI}, initial=initial(1)), "not possible with Fed"),
        (job_text(population(), initial=initial(1)), "is not possible under PopulationBased"),
        (
            job_text({"type": "Custom", "coordinator": "mine", "config": {}}, initial=initial(1)),
            "is not possible under Custom",
        ),
        (evaluation_only(LOCAL, initial=initial(1)), "initial.resume: execution.gradient is None"),
    ],
)
def test_what_cannot_be_resumed_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        JobSpec.from_json(text)
    assert said in str(refused.value)

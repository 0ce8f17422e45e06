"""Runs end as undisturbed ones whenever the coordinator crashes or workers are lost."""

from typing import Any

import pytest

from stratagem.coordinator.core import facts as f
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    EVALUATION,
    FEDERATED,
    GOSSIP,
    LOCAL,
    POPULATION_SECTIONS,
    evaluation_only,
    job_text,
    population,
    silos,
    stopping,
)
from tests.coordinator.core.simulation import Simulation, start

pytestmark = pytest.mark.core


INNER_ROUNDS = {**FEDERATED, "num_clients": 3, "rounds": 2}
REGIONS = {"north": [4, 0], "east": [5, 1, 2], "west": [3]}
REGIONAL = {
    **silos(3, 2, inner=INNER_ROUNDS),
    "options": {"regions": REGIONS, "inner": INNER_ROUNDS},
}
BY_EPOCH, BY_ROUND = {"evaluation": EVALUATION}, {"evaluation": {**EVALUATION, "every": "1 round"}}
EVALUATED = evaluation_only(DATA_PARALLEL)
JOBS: dict[str, tuple[str, str]] = {
    "Local": (job_text(LOCAL, **BY_EPOCH), "ab"),
    "DataParallel": (job_text(DATA_PARALLEL, **BY_EPOCH), "ab"),
    "Gossip": (job_text(GOSSIP, **BY_EPOCH), "ab"),
    "Federated": (job_text(FEDERATED, **BY_ROUND), "ab"),
    "silos": (job_text(silos()), "abc"),
    "regions": (job_text(REGIONAL), "ab"),
    "population": (job_text(population(), **POPULATION_SECTIONS), "ab"),
    "evaluation": (EVALUATED, "ab"),
    "Local that stops": (stopping(LOCAL), "a"),
    "DataParallel that stops": (stopping(DATA_PARALLEL), "ab"),
    "Gossip that stops": (stopping(GOSSIP), "abcd"),
    "Federated that stops": (stopping(FEDERATED), "abcd"),
    "silos that stop": (stopping(silos(2)), "abcd"),
}
NUM_LOSSES = 8
"""Points of a run, evenly apart, at which workers are lost."""


def outcome(simulation: Simulation) -> tuple[object, ...]:
    """What people get of the run: its end, its commits with their metrics, and why it stopped."""
    run = simulation.record
    committed = [fact for fact in simulation.facts(f.SegmentCommitted) if not fact.party]
    evaluated = sorted((each.segment, each.metrics) for each in simulation.facts(f.Evaluated))
    stopped = simulation.facts(f.StoppedEarly)
    return run.ended, run.reason, run.is_released, run.commits, committed, evaluated, stopped


def undisturbed(name: str) -> tuple[Simulation, tuple[object, ...]]:
    text, workers = JOBS[name]
    simulation = start(text, *workers)
    simulation.complete()
    assert simulation.record.commits
    return simulation, outcome(simulation)


@pytest.mark.parametrize("name", JOBS)
def test_crashes_after_any_commands_change_nothing(name: str) -> None:
    _, expected = undisturbed(name)
    for every in (1, 3):
        simulation = start(JOBS[name][0], *JOBS[name][1])
        while simulation.queue:
            simulation.go_on(every)
            simulation.restart()
        simulation.crash()
        assert outcome(simulation) == expected, f"a crash after every {every} commands"


@pytest.mark.parametrize("name", JOBS)
def test_losses_of_workers_after_any_command_change_nothing(name: str) -> None:
    """In turn of one, which comes back once nothing goes on without it, and of all in the moment of
    a crash: parties return to their last commits, and what they have counted since with them."""
    first, expected = undisturbed(name)
    walk, workers = start(JOBS[name][0], *JOBS[name][1]), JOBS[name][1]
    apart = max(1, len(first.journal) // NUM_LOSSES)
    for number in range(0, len(first.journal), apart):
        if not walk.queue:
            break
        simulation = walk.fork()
        if number // apart % 2:
            simulation.queue.clear()
            simulation.lose(workers, reason="gone")
            simulation.crash()
            simulation.come(workers, 1)
        else:
            simulation.lose("a")
            simulation.run()
            simulation.come("a", 1)
        simulation.run()
        assert outcome(simulation) == expected, f"a loss after {number} commands"
        walk.go_on(apart)


def test_members_that_do_not_wait_for_each_other_end_after_a_crash_as_well() -> None:
    for after in range(0, 60, 20):
        text = job_text(population(asynchronous=True), **POPULATION_SECTIONS)
        simulation = start(text, "a", "b")
        simulation.go_on(after)
        simulation.crash()
        simulation.complete()
        assert not simulation.record.is_reproducible


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, GOSSIP, FEDERATED], ids=str)
def test_a_run_commits_every_segment_once_with_the_loss_of_its_training(
    strategy: dict[str, Any],
) -> None:
    """Here each segment leaves one step out, which the next ones count on."""
    every = BY_ROUND if strategy is FEDERATED else {**BY_EPOCH, "checkpoint": {"every": "5 steps"}}
    simulation = start(job_text(strategy, **every), "a", "b")
    simulation.complete()
    run, committed = simulation.record, simulation.facts(f.SegmentCommitted)
    assert run.is_released
    assert [fact.segment for fact in committed] == list(range(1, len(committed) + 1))
    if strategy is not FEDERATED:
        assert [fact.metrics[f.SKIPPED_STEPS] for fact in committed] == [1, 2, 3, 4]
        assert run.metrics[f.SKIPPED_STEPS] == 4
    losses = {fact.segment: fact.loss for fact in simulation.facts(f.SegmentFinished)}
    losses |= {
        each.round_num: each.metrics["train.loss"] for each in simulation.facts(f.RoundClosed)
    }
    assert {each.segment: each.metrics["train.loss"] for each in run.commits[1:]} == losses

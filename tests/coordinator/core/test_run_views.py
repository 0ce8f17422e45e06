"""What people are shown of a run at every point of its life, under each strategy."""

from collections.abc import Iterator

import pytest

from stratagem.coordinator.core.commands import CancelRun, LoseWorker
from stratagem.coordinator.core.facts import MembersFormed, RunCancelled, RunCompleted, RunFailed
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.run_view import (
    RunView,
    phase_of,
    phase_then,
    view_of,
)
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    EVALUATION,
    FEDERATED,
    LOCAL,
    POPULATION_SECTIONS,
    evaluation_only,
    job_text,
    population,
    silos,
)
from tests.coordinator.core.simulation import RUN, Simulation, member, register, start

pytestmark = pytest.mark.core

JOBS = {
    "Local": job_text(LOCAL, evaluation=EVALUATION),
    "DataParallel": job_text(DATA_PARALLEL),
    "Federated": job_text(FEDERATED, evaluation={**EVALUATION, "every": "1 round"}),
    "Silos": job_text(silos()),
    "Population": job_text(population(generations=2), **POPULATION_SECTIONS),
    "Evaluation": evaluation_only(LOCAL),
}
PHASES = {
    "Local": ["WAITING", "BUILDING", "TRAINING", "COMMITTING", ""],
    "DataParallel": ["WAITING", "BUILDING", "TRAINING", "COMMITTING", ""],
    "Federated": ["WAITING", "BUILDING", "TRAINING", "AGGREGATING", "SELECTING", ""],
    "Silos": ["WAITING", "BUILDING", "TRAINING", "AGGREGATING", ""],
    "Population": ["WAITING", "TRAINING", ""],
    "Evaluation": ["WAITING", "BUILDING", "EVALUATING", ""],
}
"""What the strategies call what a run does, in the order in which it comes first."""


def view(simulation: Simulation) -> RunView:
    return view_of(world_of(simulation.state), simulation.state.runs[RUN], 7.0)


def views(simulation: Simulation) -> Iterator[RunView]:
    """The view after each thing that happens, until nothing does any more."""
    yield view(simulation)
    while simulation.queue:
        simulation.tell(simulation.queue.popleft())
        yield view(simulation)


@pytest.mark.parametrize("name", JOBS)
def test_it_tells_what_a_run_does_from_its_placement_to_its_end(name: str) -> None:
    simulation = start(JOBS[name])
    waiting = view(simulation)
    assert (waiting.phase, waiting.worker_ids) == (RunPhase.PLACING, ())
    assert "no worker is registered" in waiting.reason
    for worker in "abcd":
        simulation.tell(register(worker))
    seen = [waiting, *views(simulation)]
    assert list(dict.fromkeys(each.strategy_phase for each in seen)) == PHASES[name]
    assert [each.step for each in seen] == sorted(each.step for each in seen)
    for each in seen[:-1]:
        assert each.phase is RunPhase.PLACING or each.worker_ids or not each.strategy_phase
        assert each.ended_at_s == (7.0 if each.phase is RunPhase.COMPLETED else 0.0)
    end = seen[-1]
    assert (end.phase, end.worker_ids) == (RunPhase.COMPLETED, ())
    assert (end.step, end.segment) == (end.num_steps, end.num_segments)


def test_commits_are_shown_with_the_best_and_the_final_one() -> None:
    simulation = start(job_text(LOCAL, evaluation={**EVALUATION, "mode": "min"}, retention=1), "a")
    *_, end = views(simulation)
    shown = {each.segment: (each.is_best, each.is_final) for each in end.commits}
    assert shown == {1: (True, False), 2: (False, True)}, "accuracy grows with the steps"


def test_of_a_population_it_tells_whose_state_a_commit_is() -> None:
    *_, end = views(start(JOBS["Population"], "a"))
    for commit in end.commits:
        assert commit.member in range(4)
        assert commit.schedule[-1].values.keys() == {"optimizer.lr"}


@pytest.mark.parametrize(
    ("planes", "told"),
    [(("tls", "tls"), "tls"), (("tls", "trusted"), "trusted"), (("", ""), "")],
)
def test_tensors_are_called_secured_where_all_workers_say_so(
    planes: tuple[str, str], told: str
) -> None:
    simulation = start(job_text(DATA_PARALLEL))
    assert view(simulation).data_plane == "", "it has no workers"
    for name, plane in zip("ab", planes, strict=True):
        simulation.tell(register(name, data_plane=plane))
    assert view(simulation).worker_ids == ("a", "b")
    assert view(simulation).data_plane == told


def test_a_run_without_its_workers_recovers_and_tells_of_it() -> None:
    simulation = start(JOBS["Federated"], "a")
    simulation.tell(simulation.queue.popleft())
    simulation.tell(LoseWorker(member("a"), "killed"))
    away = view(simulation)
    assert (away.phase, away.strategy_phase) == (RunPhase.RECOVERING, "TRAINING")
    assert away.reason == (
        "round 1: 0 of 4 clients have answered; without a worker: "
        "client 0 (a), client 1 (a), client 2 (a), client 3 (a)"
    )


def test_the_phase_of_a_run_after_an_old_fact() -> None:
    simulation = start(JOBS["Local"], "a")
    run = simulation.state.runs[RUN]
    assert phase_of(world_of(simulation.state), run) is RunPhase.RUNNING
    simulation.tell(CancelRun(RUN))
    run = simulation.state.runs[RUN]
    assert phase_of(world_of(simulation.state), run) is RunPhase.CANCELLED
    assert phase_then(RunCancelled(reason="enough")) is RunPhase.CANCELLED
    assert phase_then(RunFailed(reason="it raised")) is RunPhase.FAILED
    assert phase_then(RunCompleted(reason="20 steps")) is RunPhase.COMPLETED
    assert phase_then(simulation.facts(RunCancelled)[0]).is_terminal
    assert not phase_then(simulation.facts(MembersFormed)[0]).is_terminal

"""What a client says of a population is what the coordinator keeps of it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.client.course.population import (
    Population,
    PopulationFolding,
    population,
    winner_text,
)
from stratagem.client.course.views import Commit
from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.run_view import view_of
from tests.client.course.recorded import golden, job_of, simulated
from tests.coordinator.core.jobs import POPULATION_SECTIONS, job_text
from tests.coordinator.core.jobs import population as strategy
from tests.coordinator.core.simulation import RUN, Simulation, start


def read(simulation: Simulation) -> Population:
    events = simulated(simulation)
    return population(events, job_of(events))


@pytest.mark.parametrize(("asynchronous", "seed"), [(False, 0), (False, 1), (True, 2)])
def test_each_commit_has_the_lineage_and_schedule_that_the_coordinator_says(
    asynchronous: bool, seed: int
) -> None:
    text = job_text(
        strategy(size=6, generations=5, asynchronous=asynchronous),
        **POPULATION_SECTIONS,
        seed=seed,
        retention=10,
    )
    simulation = start(text, "a", "b", "c")
    simulation.run()
    found = read(simulation)
    commits = view_of(world_of(simulation.state), simulation.state.runs[RUN], 0.0).commits
    assert len(found.generations) == len(commits) == 5
    for commit, generation in zip(commits, found.generations, strict=True):
        assert commit.member is not None
        assert (generation.best, generation.step) == (commit.member, commit.step)
        schedule = found.schedule(commit.member, generation.number)
        assert list(schedule) == [
            (setting.from_step, dict(setting.values)) for setting in commit.schedule
        ]
        assert found.lineage(commit.member, generation.number)[-1] == commit.member
    assert any(len(set(found.lineage(member))) > 1 for member in range(6)), "nobody was copied"


def test_the_best_member_is_that_of_the_best_commit() -> None:
    events = golden("golden-population")
    found = population(events, job_of(events))
    assert (found.metric, found.mode) == ("test.loss", "min")
    best = found.best
    assert best is not None
    scores = [
        (member.score, generation.number, member.member)
        for generation in found.generations
        for member in generation.members
        if member.score is not None
    ]
    assert best.score == min(scores)[0]
    assert best.params == found.schedule(best.member, best.generation)[-1][1]
    assert str(best).startswith(f"member {best.member}, model.kwargs.dropout ")
    assert f", optimizer.lr {best.params['optimizer.lr']:.6g}, " in str(best)
    assert str(best).endswith(f", score {best.score:.4g}")
    with pytest.raises(KeyError, match="no member 17 in generation 2"):
        found.lineage(17, 2)


def test_where_less_is_better_the_least_score_wins_and_is_shown_as_it_was_measured() -> None:
    """Scores are journaled higher is better."""
    sections = {
        **POPULATION_SECTIONS,
        "evaluation": {"metrics": ["accuracy"], "best": "accuracy", "mode": "min"},
    }
    simulation = start(job_text(strategy(generations=1), **sections), "a")
    simulation.run()
    found = read(simulation)
    assert found.best is not None
    assert found.best.score == min(m.score or 1.0 for m in found.generations[0].members) > 0


def test_a_run_that_is_no_population_has_no_generations() -> None:
    events = golden("golden-local")
    found = population(events, job_of(events))
    assert found.generations == ()
    assert found.best is None


def test_the_winner_of_a_status_is_said_in_one_line() -> None:
    values = {"optimizer.lr": 0.0314159, "optimizer.momentum": 0.9}
    commit = Commit(
        *(5, 25, "d" * 64), is_best=True, is_final=True, metrics={"test.accuracy": 0.9444}, path=""
    )
    job = {"evaluation": {"split": "test", "best": "accuracy"}}
    of_member = replace(commit, member=3, hyperparameters=values)

    def winner(*commits: Commit) -> str:
        status: Any = SimpleNamespace(commits=commits, job=job)
        return winner_text(status)

    assert (
        winner(of_member)
        == "member 3, optimizer.lr 0.0314159, optimizer.momentum 0.9, score 0.9444"
    )
    assert winner(commit) == ""
    assert winner() == ""


def test_members_share_their_pasts() -> None:
    """Of copies of them the memory would grow with the square of the generations."""
    events = list(golden("golden-population"))
    formed = next(each for each in events if each.kind == "PopulationFormed")
    folding = PopulationFolding(job_of(events) | {"strategy": {"generations": None}})
    folding.fold(formed)
    size, count = len(formed.payload["params"]), 3000
    for number in range(1, count + 1):
        copied = {"member": 0, "donor": 1, "step": number, "params": {"optimizer.lr": 1 / number}}
        closed = {"generation": number, "scores": [0.5] * size, "copied": [copied], "best": 1}
        folding.fold(replace(formed, kind="GenerationClosed", payload=closed))
    found = folding.population
    before, newest = found.generations[-2], found.generations[-1]
    for member in newest.members:
        donor = before.of(1 if member.member == 0 else member.member)
        assert donor is not None
        assert member.now.before is donor.now
    assert found.lineage(0)[-3:] == (1, 1, 0)
    assert len(found.lineage(1)) == len(found.generations) == count + 1

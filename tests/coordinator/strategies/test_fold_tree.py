"""The tree in which a round's updates are added up, in the pure core."""

from typing import Any

import pytest

from stratagem.coordinator.core.commands import SubmitRun
from stratagem.coordinator.core.effects import AggregateRound
from stratagem.coordinator.core.facts import RosterFormed, RoundClosed
from stratagem.coordinator.core.state_machine.pending_effects import pending
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, reason, register, start

pytestmark = pytest.mark.core

SITES = {"south": ["dover", "anna"], "north": ["cork", "bern"]}


def trees(simulation: Simulation) -> list[tuple[tuple[int, ...], ...]]:
    """Let everything happen; the trees of all folds, in order of round."""
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    while simulation.queue:
        simulation.tell(simulation.queue.popleft())
        folds = (e for e in pending(simulation.state) if isinstance(e, AggregateRound))
        found |= {fold.round_num: fold.regions for fold in folds}
    return [found[number] for number in sorted(found)]


def strategy(regions: Any, **changes: Any) -> dict[str, Any]:
    return {**FEDERATED, "options": {"regions": regions}, **changes}


def test_regions_by_name_and_clients_by_number() -> None:
    simulation = start(job_text(strategy({"b": [0, 2], "a": [3, 1]})), "x", "y")
    assert trees(simulation) == [((1, 3), (0, 2))] * 3


def test_places_are_those_of_the_updates_of_the_round() -> None:
    """Of the clients that were drawn; a region without any is left out."""
    drawn = {"method": "Random", "fraction": 0.5}
    simulation = start(job_text(strategy({"b": [0, 3], "a": [1, 2]}, client_selection=drawn)), "x")
    region = {0: "b", 1: "a", 2: "a", 3: "b"}
    found = trees(simulation)
    assert len(found) == 3
    for closed, tree in zip(simulation.facts(RoundClosed), found, strict=True):
        clients = [accepted.client for accepted in closed.accepted]
        expected = [tuple(p for p, c in enumerate(clients) if region[c] == name) for name in "ab"]
        assert tree == tuple(places for places in expected if places)


def test_without_regions_there_is_no_tree() -> None:
    simulation = start(job_text(FEDERATED), "x")
    assert trees(simulation) == [()] * 3


def test_the_roster_is_made_of_the_sites_that_regions_name() -> None:
    """Others with the same data are no clients; without one that is named the run waits."""
    simulation = Simulation()
    for name in ("aachen", "anna", "bern", "cork"):
        simulation.tell(register(name, local_data=("ward",)))
    ward = {"data": {"worker_local": "ward"}}
    simulation.tell(SubmitRun(RUN, job_text(strategy(SITES), **ward), 0.0))
    simulation.run()
    assert not simulation.facts(RosterFormed)
    needed = "4 workers with data 'ward' that options.regions names are needed, 3 are here"
    assert reason(simulation) == needed
    simulation.tell(register("dover", local_data=("ward",)))
    assert trees(simulation) == [((1, 2), (0, 3))] * 3
    (roster,) = simulation.facts(RosterFormed)
    assert [b.worker_id for b in roster.clients] == ["anna", "bern", "cork", "dover"]

"""What 10,000 clients cost, as far as it can be counted: facts, their bytes, effects, look-ups."""

from collections import Counter
from dataclasses import replace

import pytest

from stratagem.coordinator.core.commands import SubmitRun
from stratagem.coordinator.core.facts import (
    ClientsJoined,
    ClientsSelected,
    RosterFormed,
    UpdateReceived,
)
from stratagem.coordinator.core.state import World
from stratagem.coordinator.core.state_machine.agenda import Agenda
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.strategies.federated.federated_run import MAX_CLIENTS_AHEAD
from stratagem.coordinator.strategies.scheduling import placement
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, register, start

pytestmark = pytest.mark.core

NUM_CLIENTS, NUM_ASKED, NUM_ROUNDS = 10_000, 100, 2
DRAWN = {"method": "Random", "fraction": NUM_ASKED / NUM_CLIENTS}
STRATEGY = {
    **FEDERATED,
    "num_clients": NUM_CLIENTS,
    "rounds": NUM_ROUNDS,
    "client_selection": DRAWN,
}


def test_a_round_costs_what_its_clients_cost_however_many_there_are() -> None:
    """Each round has a fact per client that is asked and few more, none of which names the others;
    and no more effects are due than the workers are ahead."""
    simulation = start(job_text(STRATEGY), "a", "b")
    most_due = 0
    while simulation.queue:
        most_due = max(most_due, len(pending(simulation.state)))
        simulation.tell(simulation.queue.popleft())
    kinds = Counter(kind for _, kind, _, _ in simulation.journal)
    largest = max(len(text) for _, kind, text, _ in simulation.journal if kind != "RosterFormed")
    assert kinds["UpdateReceived"] == NUM_ROUNDS * NUM_ASKED
    of_rounds = ("ClientsSelected", "ClientsAssigned", "RoundClosed", "SegmentCommitted")
    assert [kinds[kind] for kind in of_rounds] == [NUM_ROUNDS] * len(of_rounds)
    assert kinds["RosterFormed"] == 1
    assert kinds.total() - NUM_ROUNDS * NUM_ASKED < 20
    assert largest < 200 * NUM_ASKED
    assert 0 < most_due <= 2 * MAX_CLIENTS_AHEAD
    (roster,) = simulation.facts(RosterFormed)
    assert len(roster.clients) == NUM_CLIENTS
    asked = [fact.clients for fact in simulation.facts(ClientsSelected)]
    answered = Counter(fact.client for fact in simulation.facts(UpdateReceived))
    assert answered == Counter(client for clients in asked for client in clients)


def test_sites_join_by_the_thousand() -> None:
    """10,000 sites join with ten facts."""
    roster = {"open": True, "min_clients": NUM_CLIENTS}
    simulation = Simulation()
    _crowd(simulation)
    strategy = {**STRATEGY, "options": {"roster": roster}}
    simulation.tell(SubmitRun(RUN, job_text(strategy), 0.0))
    while not simulation.facts(ClientsSelected):
        simulation.tell(simulation.queue.popleft())
    joined = simulation.facts(ClientsJoined)
    assert [len(fact.clients) for fact in joined] == [1000] * 10
    numbers = [binding.client for fact in joined for binding in fact.clients]
    assert numbers == list(range(NUM_CLIENTS))


def test_workers_are_looked_through_once_until_some_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = start(job_text(STRATEGY), "a", "b")
    job, world = simulation.state.runs[RUN].job, world_of(simulation.state)
    looked = Counter[str]()
    look = placement._eligible

    def counted(*args: object) -> object:
        looked["looks"] += 1
        return look(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(placement, "_eligible", counted)
    found = [placement.eligible(job, world, "") for _ in range(100)]
    assert looked.total() == 1
    assert found[0] == found[-1]
    assert found[0] is not found[-1], "who asks may change its list"
    fewer = World({name: w for name, w in world.workers.items() if name != "a"}, {})
    assert [w.member.worker_id for w in placement.eligible(job, fewer, "")] == ["b"]
    assert looked.total() == 2


def _crowd(simulation: Simulation) -> None:
    """Put 10,000 workers into the state: each as if it had registered."""
    simulation.tell(register("w00000"))
    (one,) = simulation.state.workers.values()
    names = [f"w{n:05}" for n in range(NUM_CLIENTS)]
    members = {name: one.member.model_copy(update={"worker_id": name}) for name in names}
    workers = {name: replace(one, member=member) for name, member in members.items()}
    simulation.state = replace(simulation.state, workers=workers)  # type: ignore[arg-type]
    simulation.agenda = Agenda(simulation.state)

"""What thousands of clients cost, as far as it can be counted: facts, their bytes, effects,
look-ups; and the guess where those of the next round train, to bring the state ahead."""

from collections import Counter
from typing import Any

import pytest

from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.effects import AggregateRound
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.world import World
from stratagem.coordinator.strategies import placement
from stratagem.coordinator.strategies.federated.decisions import next_trainers
from stratagem.coordinator.strategies.federated.run import MAX_CLIENTS_AHEAD
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import Simulation, start, trained

pytestmark = pytest.mark.core


NUM_CLIENTS, NUM_ASKED, NUM_ROUNDS = 3_000, 50, 2
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
        simulation.step()
    kinds = Counter(kind for _, kind, _, _ in simulation.journal)
    largest = max(len(text) for _, kind, text, _ in simulation.journal if kind != "RosterFormed")
    assert kinds["UpdateReceived"] == NUM_ROUNDS * NUM_ASKED
    of_rounds = ("ClientsSelected", "ClientsAssigned", "RoundClosed", "SegmentCommitted")
    assert [kinds[kind] for kind in of_rounds] == [NUM_ROUNDS] * len(of_rounds)
    assert kinds["RosterFormed"] == 1
    assert kinds.total() - NUM_ROUNDS * NUM_ASKED < 20
    assert largest < 200 * NUM_ASKED
    assert 0 < most_due <= 2 * MAX_CLIENTS_AHEAD
    roster = simulation.fact(f.RosterFormed)
    assert len(roster.clients) == NUM_CLIENTS
    asked = [fact.clients for fact in simulation.facts(f.ClientsSelected)]
    answered = Counter(fact.client for fact in simulation.facts(f.UpdateReceived))
    assert answered == Counter(client for clients in asked for client in clients)


def test_workers_are_looked_through_once_until_some_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = start(job_text(STRATEGY), "a", "b")
    job, world = simulation.record.job, world_of(simulation.state)
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


# ---- where clients of the next round train is guessed before it opens ----


EIGHT: dict[str, Any] = {**FEDERATED, "num_clients": 8, "rounds": 4}
WORKERS = ("a", "b", "c", "d")
PRIVACY = {"clip": {"norm": 8.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}


def guessed(simulation: Simulation) -> set[str] | None:
    """The workers that are guessed where a round is being aggregated."""
    run = simulation.record
    if not any(isinstance(effect, AggregateRound) for effect in pending(simulation.state)):
        return None
    return {str(name) for name in next_trainers(run.job, run.value)}


def drawn(fraction: float, **options: Any) -> dict[str, Any]:
    selection = {"method": "Random", "fraction": fraction}
    return {"client_selection": selection, "options": options}


STRIKES = {"limit": 1, "bench_rounds": 1}
TAGGED = {"client_selection": {"method": "ByCapability", "required_tags": []}}


@pytest.mark.parametrize(
    ("changes", "fewer"),
    [
        ({}, False),
        (drawn(0.25), True),
        (drawn(0.125, over_select=1, strikes=STRIKES), True),
        (TAGGED, False),
    ],
)
def test_the_guess_is_where_they_train(changes: dict[str, Any], fewer: bool) -> None:
    simulation = start(job_text({**EIGHT, **changes}), *WORKERS)
    before, compared = None, []
    while simulation.queue:
        simulation.step()
        if (guess := guessed(simulation)) is not None:
            before = guess
        elif before is not None and (training := trained(simulation)):
            assert {str(effect.member.worker_id) for effect in training} == before
            compared.append(before)
            before = None
    assert len(compared) == EIGHT["rounds"] - 1
    assert any(len(names) < len(WORKERS) for names in compared) == fewer


def test_nobody_is_told_of_a_secret_draw() -> None:
    simulation, seen = start(job_text({**EIGHT, **drawn(0.25)}, privacy=PRIVACY), *WORKERS), []
    while simulation.queue:
        simulation.step()
        if (guess := guessed(simulation)) is not None:
            seen.append(guess)
    assert seen
    assert not any(seen)

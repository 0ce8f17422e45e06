"""Federations with an open roster, and what happens to their clients, for the tests of both."""

from collections.abc import Iterable
from typing import Any

from stratagem.coordinator.core import commands as c
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.effects import AggregateRound, EvaluateState
from stratagem.coordinator.core.facts.fact_values import Cause
from tests.coordinator.core.ask_every_run import next_deadline
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, do, member, rejected, trained

WARD = {"worker_local": "ward"}
EVALUATION = {"split": "test", "metrics": []}
GPU = {"method": "ByCapability", "required_tags": ["gpu"]}


def federation(num_clients: int = 5, rounds: int = 3, **options: Any) -> dict[str, Any]:
    roster = {"open": True, "min_clients": 2, "wait_s": 60.0} | options.pop("roster", {})
    options = {"roster": roster, **options}
    return {**FEDERATED, "num_clients": num_clients, "rounds": rounds, "options": options}


def begun(
    workers: Iterable[str], strategy: dict[str, Any] | None = None, **changes: Any
) -> Simulation:
    """A federation of sites whose first round is open where they are enough, and nobody has
    answered."""
    simulation = Simulation()
    simulation.sites(workers)
    sections = {name: each for name, each in ({"data": WARD} | changes).items() if each}
    text = job_text(strategy or federation(), **sections)
    simulation.tell(c.SubmitRun(RUN, text, 0.0))
    while simulation.queue and not simulation.facts(f.ClientsSelected):
        simulation.step()
    simulation.queue.clear()
    return simulation


def answer(simulation: Simulation, *clients: int) -> None:
    """These clients of the open round send their updates; the round is folded if it closes."""
    for effect in trained(simulation):
        if effect.client in clients:
            simulation.report(do(effect))
    fold(simulation)


def fold(simulation: Simulation) -> None:
    """Let the fold of a closed round happen, and its evaluation, and nothing else."""
    simulation.seen = set()
    simulation.queue.clear()
    while simulation.record.value.accepted:
        simulation.report(do(simulation.due_one(AggregateRound)))
    simulation.queue.clear()


def failure(simulation: Simulation, client: int, cause: Cause, **more: Any) -> f.UpdateRejected:
    of_round = simulation.record.value.round_num
    return rejected(client, more.pop("reason", cause.value), cause, round_num=of_round, **more)


def fail(
    simulation: Simulation, *clients: int, cause: Cause = Cause.EXCEPTION, **more: Any
) -> None:
    for client in clients:
        simulation.report(failure(simulation, client, cause, **more))
        fold(simulation)


def close_until(simulation: Simulation, client: int, opens_in_s: float) -> None:
    reason = f"site {client} is closed: opens Mon 19:00"
    fail(simulation, client, cause=Cause.OUTSIDE_WINDOW, reason=reason, opens_in_s=opens_in_s)


def leave(simulation: Simulation, names: str, why: str = "stopped") -> None:
    for name in names:
        simulation.tell(c.LeaveWorker(member(name), why))


def drain(simulation: Simulation, names: str) -> None:
    for name in names:
        simulation.tell(c.DrainWorker(member(name)))


def evaluate(simulation: Simulation) -> None:
    simulation.report(*map(do, simulation.due(EvaluateState)))
    simulation.queue.clear()


def later(simulation: Simulation, seconds: float) -> None:
    simulation.tick(simulation.now_s + seconds)


def roster(simulation: Simulation) -> dict[int, str]:
    return {b.client: b.worker_id for b in simulation.record.value.roster}


def selected(simulation: Simulation) -> list[tuple[int, tuple[int, ...]]]:
    return [(fact.round_num, fact.clients) for fact in simulation.facts(f.ClientsSelected)]


def clients_due(simulation: Simulation) -> list[int]:
    return [effect.client for effect in trained(simulation)]


def deadline(simulation: Simulation) -> float | None:
    return next_deadline(simulation.state)


def closing(simulation: Simulation) -> tuple[list[int], str]:
    """Who is in the only round that was closed, and why it was."""
    closed = simulation.fact(f.RoundClosed)
    return [accepted.client for accepted in closed.accepted], closed.reason


def left(simulation: Simulation) -> list[tuple[int, str]]:
    return [(fact.client, fact.reason) for fact in simulation.facts(f.ClientLeft)]

"""Federated clients that are parties of their own, in the pure core."""

from typing import Any

import pytest

from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import LoseWorker, Report
from stratagem.coordinator.core.effects import CollectUpdate, RunSegment, TrainClient
from stratagem.coordinator.core.facts import (
    MembersFormed,
    PartyFailed,
    RoundClosed,
    SegmentCommitted,
    UpdateReceived,
)
from stratagem.coordinator.core.pending import live_blobs, pending
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.strategies.table import require
from tests.core.simulation import RUN, Simulation, job, member, register, start

pytestmark = pytest.mark.core

INNER = {"type": "DataParallel", "num_replicas": 2, "aggregation": {"method": "AllReduce"}}


def silos(
    num_clients: int = 2, rounds: int = 3, inner: Any = None, **changes: Any
) -> dict[str, Any]:
    strategy = {
        "type": "Federated",
        "num_clients": num_clients,
        "rounds": rounds,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
        "options": {"inner": inner or INNER},
    }
    return strategy | changes


def commits(simulation: Simulation) -> list[SegmentCommitted]:
    found: list[SegmentCommitted] = simulation.facts(SegmentCommitted)  # type: ignore[assignment]
    return [fact for fact in found if not fact.party]


@pytest.mark.parametrize("workers", ["abcd", "ab", "a"])
def test_rounds_go_by_on_any_number_of_workers(workers: str) -> None:
    simulation = start(job(silos()), *workers)
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED, run.reason
    assert [fact.segment for fact in commits(simulation)] == [1, 2, 3]
    assert len(simulation.facts(UpdateReceived)) == 6
    assert run.is_reproducible


def test_silos_take_workers_of_their_own_where_there_are_enough() -> None:
    simulation = start(job(silos()), *"abcd")
    while not [e for e in pending(simulation.state) if isinstance(e, RunSegment)]:
        simulation.tell(simulation.queue.popleft())
    simulation.run()
    formed = {
        fact.party: {member.worker_id for member in fact.members}  # type: ignore[union-attr]
        for fact in simulation.facts(MembersFormed)
        if fact.party  # type: ignore[union-attr]
    }
    assert formed.keys() == {"client0", "client1"}
    assert formed["client0"].isdisjoint(formed["client1"])
    assert len(formed["client0"] | formed["client1"]) == 4


def test_every_round_begins_from_the_global_state() -> None:
    simulation = start(job(silos()), *"abcd")
    bases: dict[str, set[tuple[int, str]]] = {}
    for _ in range(1000):
        for effect in pending(simulation.state):
            assert not isinstance(effect, TrainClient)
            if isinstance(effect, RunSegment):
                bases.setdefault(effect.party, set()).add((effect.lineage, effect.base.digest))
                assert (effect.segment, effect.base.step) == (1, 0)
            if isinstance(effect, CollectUpdate):
                assert effect.digest in live_blobs(simulation.state)
        if not simulation.queue:
            break
        simulation.tell(simulation.queue.popleft())
    assert set(bases) == {"client0", "client1"}
    assert len(bases["client0"]) == 3
    assert {digest for _, digest in bases["client0"]} == {d for _, d in bases["client1"]}


def test_crash_or_loss_after_any_command_ends_the_same() -> None:
    undisturbed = start(job(silos()), *"abc")
    undisturbed.run()
    expected = [(fact.segment, fact.digest) for fact in commits(undisturbed)]
    for after in range(0, 40, 3):
        for disturb in ("crash", "lose"):
            simulation = start(job(silos()), *"abc")
            for _ in range(after):
                if simulation.queue:
                    simulation.tell(simulation.queue.popleft())
            if disturb == "crash":
                simulation.crash()
            else:
                simulation.tell(LoseWorker(member("a"), "killed"))
                simulation.run()
                simulation.tell(register("a", start=1))
            simulation.run()
            assert [(fact.segment, fact.digest) for fact in commits(simulation)] == expected


def test_a_silo_whose_code_raises_fails_the_run() -> None:
    simulation = start(job(silos()), *"ab")
    simulation.tell(Report(RUN, PartyFailed(party="client1", reason="ValueError: no")))
    run = simulation.state.runs[RUN]
    assert (run.ended, run.reason) == (RunPhase.FAILED, "ValueError: no")


def test_rounds_with_some_of_the_silos() -> None:
    selection = {"method": "Random", "fraction": 0.5}
    simulation = start(job(silos(num_clients=4, rounds=4, client_selection=selection)), *"abcd")
    simulation.run()
    assert simulation.state.runs[RUN].ended is RunPhase.COMPLETED
    assert [len(fact.accepted) for fact in simulation.facts(RoundClosed)] == [2] * 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "sections", "field"),
    [
        ({"aggregation": {"method": "FedProx", "mu": 0.1}}, {}, "strategy.aggregation.method"),
        (
            {"client_selection": {"method": "ByCapability", "required_tags": []}},
            {},
            "strategy.client_selection.method",
        ),
        ({}, {"data": {"worker_local": "ward"}}, "data.worker_local"),
        (
            {},
            {"optimizer": {"name": "sgd", "lr": 0.1, "schedule": "cosine"}},
            "optimizer.schedule",
        ),
        (
            {"options": {"inner": {**INNER, "num_replicas": 99}}},
            {},
            "strategy.options.inner.num_replicas",
        ),
        ({"options": {"inner": silos()}}, {}, "strategy.options.inner"),
        (
            {"options": {"inner": {"type": "Custom", "coordinator": "mine", "config": None}}},
            {},
            "strategy.options.inner.coordinator",
        ),
    ],
)
def test_what_a_silo_cannot_do_is_refused(
    changes: dict[str, Any], sections: dict[str, Any], field: str
) -> None:
    found = JobSpec.from_json(job(silos(**changes), **sections))
    assert [violation.field for violation in require(found).check(found)] == [field]


def test_an_inner_local_is_no_silo() -> None:
    found = JobSpec.from_json(job(silos(inner={"type": "Local"})))
    assert require(found).__name__.endswith("federated")  # type: ignore[attr-defined]

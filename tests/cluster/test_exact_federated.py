"""Federated averaging over real processes: bits, order of arrival, and who is left out."""

from collections import Counter
from math import isclose
from typing import Any

import pytest
import torch

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.common.base.ids import WorkerId
from stratagem.common.strategy import Federated, Random
from stratagem.coordinator.core.facts import ClientBinding
from stratagem.coordinator.strategies.federated.client_selection import select
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    Outcome,
    assert_same_bits,
    federated,
    outcome_of,
    train,
    wait_for,
)
from tests.common.observe.scrape import scrape_process
from tests.jobs import user_data
from tests.patience import growing
from tests.reference.loops import federated_loop

pytestmark = pytest.mark.cluster

HALF = {"method": "Random", "fraction": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "contiguous": {"partition": {"method": "contiguous"}},
    "by label": {"model": "everything", "partition": {"method": "by_label"}},
    "dirichlet": {
        "model": "dropout_mlp",
        "partition": {"method": "dirichlet", "alpha": 0.5},
        "options": {"local_epochs": 2},
    },
    "batch norm": {"model": "batch_norm_mlp", "batch_size": 25},
    "more clients than workers": {"num_clients": 7, "selection": HALF, "rounds": 4},
    "micro-batches": {
        "model": "dropout_mlp",
        "accumulation": {"steps": 3, "non_finite": "skip_step"},
    },
    "regions": {
        "model": "batch_norm_mlp",
        "num_clients": 5,
        "partition": {"method": "by_label"},
        "options": {"regions": {"south": [3, 0], "north": [4, 1, 2]}},
    },
    "half of four": {"partition": {"method": "by_label"}, "selection": HALF, "rounds": 4},
}


YOGI = {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.01}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "prox": {"aggregation": {"method": "FedProx", "mu": 0.3}, "options": {"local_epochs": 2}},
    "yogi": {
        "model": "everything",
        "aggregation": YOGI,
        "options": {"server_learning_rate": 0.05},
    },
    "adam": {"model": "batch_norm_mlp", "options": {"server_optimizer": {"name": "fedadam"}}},
    "adagrad": {"options": {"server_optimizer": {"name": "fedadagrad", "learning_rate": 0.05}}},
    "prox in coded regions": {
        "num_clients": 5,
        "aggregation": {"method": "FedProx", "mu": 0.2},
        "compression": {"codec": "int8"},
        "options": {
            "regions": {"south": [3, 0], "north": [4, 1, 2]},
            "quorum": 3,
            "server_optimizer": {"name": "fedadam"},
        },
    },
    "momentum after prox": {
        "aggregation": {"method": "FedProx", "mu": 0.1},
        "options": {"server_optimizer": {"name": "fedavgm", "momentum": 0.5}},
    },
}


def selected(outcome: Outcome) -> dict[int, list[int]]:
    """The clients of each round, as the journal has them."""
    payloads = [event.payload for event in outcome.of("ClientsSelected")]
    return {each["round_num"]: each["clients"] for each in payloads}


@pytest.mark.parametrize("case", CASES)
def test_bits_of_the_federated_loop(client: Client, case: str) -> None:
    spec = federated(**CASES[case])
    assert isinstance(spec.strategy, Federated)
    outcome = train(client, spec)
    rounds = selected(outcome)
    roster = [
        ClientBinding(client=number, worker_id=WorkerId("any"), tags=())
        for number in range(spec.strategy.num_clients)
    ]
    drawn = {n: list(select(spec.strategy.client_selection, roster, 3, n)) for n in rounds}
    assert rounds == drawn
    expected = federated_loop(spec, ALLOWED, lambda round_num: drawn[round_num])
    assert_same_bits(outcome.state, expected.state)
    metrics = outcome.status.metrics
    assert isclose(metrics["train.loss"], expected.losses[-1], rel_tol=1e-12)
    received = [each.payload for each in outcome.of("UpdateReceived")]
    updates = [each for each in received if each["round_num"] == spec.strategy.rounds]
    assert metrics["train.loss_max"] == max(each["loss"] for each in updates)
    norms = [each["metrics"]["train.max_grad_norm"] for each in updates]
    assert metrics["train.max_grad_norm"] == max(norms) > 0
    assert ("train.skipped_steps" in outcome.status.metrics) == (case == "micro-batches")
    assert outcome.status.commits[-1].metrics["train.loss"] == metrics["train.loss"]
    assert len(outcome.digests) == spec.strategy.rounds
    assert outcome.status.reproducible


@pytest.mark.parametrize("case", AGGREGATIONS)
def test_bits_of_every_aggregation(client: Client, case: str) -> None:
    spec = federated(**{"batch_size": 25, "rounds": 4, **AGGREGATIONS[case]})
    outcome = train(client, spec)
    assert_same_bits(outcome.state, federated_loop(spec, ALLOWED).state)
    changes = {"aggregation": {"method": "FedAvg"}, "options": {"local_epochs": 1}}
    plain = federated(**{"batch_size": 25, "rounds": 4, **AGGREGATIONS[case], **changes})
    other = federated_loop(plain, ALLOWED).state
    assert any(not torch.equal(outcome.state[name], tensor) for name, tensor in other.items())


def test_prox_without_mu_is_fed_avg(client: Client) -> None:
    spec = federated("dropout_mlp", aggregation={"method": "FedProx", "mu": 0.0})
    outcome = train(client, spec)
    assert outcome.digests == train(client, federated("dropout_mlp")).digests


def test_order_of_arrival_changes_no_bit(client: Client, gates: Gates) -> None:
    """Four clients on four workers answer in the order in which the test lets them."""
    spec = federated(
        rounds=2, batch_size=64, data=user_data("gated_clients", folder=str(gates.folder))
    )
    orders = {"up": [[0, 1, 2, 3], [0, 1, 2, 3]], "down": [[3, 1, 0, 2], [2, 3, 0, 1]]}
    outcomes = {}
    for name, rounds in orders.items():
        gates.close(*(f"client{c}-{n}" for c in range(4) for n in (1, 2)))
        run = client.submit(spec)
        num_updates = 0
        for round_num, order in enumerate(rounds, start=1):
            for number in order:
                gates.open(f"client{number}-{round_num}")
                num_updates += 1
                wait_for(run, "UpdateReceived", num_updates)
        outcomes[name] = outcome_of(run)
        arrived = [event.payload["client"] for event in outcomes[name].of("UpdateReceived")]
        assert arrived == [number for order in rounds for number in order]
    assert outcomes["up"].digests == outcomes["down"].digests
    assert outcomes["up"].status.metrics == outcomes["down"].status.metrics
    assert_same_bits(outcomes["up"].state, federated_loop(spec, ALLOWED).state)


def refused(cluster: LocalCluster) -> Counter[str]:
    """Updates that do not count, by cause, since the coordinator's start."""
    found = scrape_process(cluster, "coordinator")["stratagem_coordinator_updates_refused_total"]
    return Counter({dict(labels)["cause"]: int(number) for labels, number in found.items()})


def test_client_with_nan_is_rejected_alone(client: Client, exact_cluster: LocalCluster) -> None:
    before = refused(exact_cluster)
    spec = federated(
        "acting_models:Poisonable", data=user_data("poisoned", poisoned_client=2), rounds=2
    )
    outcome = train(client, spec)
    rejected = [event.payload for event in outcome.of("UpdateRejected")]
    assert [(each["round_num"], each["client"]) for each in rejected] == [(1, 2), (2, 2)]
    assert all("hidden" in each["reason"] for each in rejected)
    assert refused(exact_cluster) - before == Counter(not_finite=2)
    first = outcome.of("RoundClosed")[0].sentence
    assert first.startswith("round 1 closed: 3 of 4 updates, 1 rejected (client 2: ")
    expected = federated_loop(spec, ALLOWED, lambda _: [0, 1, 3])
    assert_same_bits(outcome.state, expected.state)


def test_clients_are_chosen_by_the_tags_of_their_workers(client: Client) -> None:
    """Client c of 8 lives on worker c % 4; worker-1 and worker-3 are tagged, see conftest."""
    for tags, chosen in ((["fast"], [1, 3, 5, 7]), (["fast", "large"], [3, 7])):
        selection = {"method": "ByCapability", "required_tags": tags}
        spec = federated(num_clients=8, rounds=2, selection=selection)
        outcome = train(client, spec)
        assert selected(outcome) == {1: chosen, 2: chosen}
        expected = federated_loop(spec, ALLOWED, lambda _, chosen=chosen: chosen)  # type: ignore[misc]
        assert_same_bits(outcome.state, expected.state)


def test_deadline_closes_a_round_with_a_quorum(
    client: Client, gates: Gates, exact_cluster: LocalCluster
) -> None:
    train(client, federated(rounds=1))  # the first step of a process takes torch a while
    for deadline_s in growing(4.0):
        spec = federated(
            rounds=1,
            batch_size=64,
            data=user_data("gated_clients", folder=str(gates.folder)),
            options={"quorum": 0.75, "round_deadline_s": deadline_s},
        )
        gates.close("client2-1")
        before = refused(exact_cluster)
        run = client.submit(spec)
        for _ in run.watch():
            pass
        reason = run.status().reason
        if not reason.endswith("deadline passed; 3 are needed"):  # as it does on a busy machine
            break
        gates.open()
    outcome = outcome_of(run)
    closed = outcome.of("RoundClosed")[0]
    assert closed.payload["reason"] == "round 1: 3 of 4 updates, deadline passed"
    assert refused(exact_cluster) - before == Counter(late=1)
    assert not outcome.status.reproducible
    gates.open()
    assert_same_bits(outcome.state, federated_loop(spec, ALLOWED, lambda _: [0, 1, 3]).state)


def test_over_selection_takes_the_first_and_ends_the_others(client: Client, gates: Gates) -> None:
    spec = federated(
        rounds=2,
        batch_size=8,
        data=user_data("gated_clients", folder=str(gates.folder)),
        selection=HALF,
        options={"over_select": 2},
    )
    gates.close("client0-1", "client3-1")
    run = client.submit(spec)
    wait_for(run, "RoundClosed")
    gates.open()
    outcome = outcome_of(run)
    closed = [event.payload for event in outcome.of("RoundClosed")]
    accepted = [[each["client"] for each in payload["accepted"]] for payload in closed]
    assert accepted[0] == [1, 2]
    assert closed[0]["reason"] == "round 1: 2 of 4 updates, 2 suffice"
    assert selected(outcome) == {1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}
    assert not outcome.status.reproducible
    expected = federated_loop(spec, ALLOWED, lambda round_num: accepted[round_num - 1])
    assert_same_bits(outcome.state, expected.state)


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_late_update_enters_the_next_round_though_the_coordinator_is_killed(
    exact_cluster: LocalCluster, client: Client, gates: Gates, is_killed: bool
) -> None:
    """Two of four clients are drawn, the first suffices; round 2 has the other two."""
    sections: dict[str, Any] = {
        "model": "batch_norm_mlp",
        "rounds": 3,
        "batch_size": 64,
        "data": user_data("gated_clients", folder=str(gates.folder)),
        "selection": {"method": "Random", "fraction": 0.25},
        "options": {
            "over_select": 1,
            "late_updates": {"discount": 0.5},
            "server_optimizer": {"name": "fedavgm", "momentum": 0.5},
        },
    }
    seed = next(each for each in range(99) if not set(drawn(each, 1)) & set(drawn(each, 2)))
    (first, late), (second, other) = drawn(seed, 1), drawn(seed, 2)
    spec = federated(**sections, seed=seed)
    held = [f"client{each}-1" for each in (late, second, other)]
    gates.close(*held)
    run = client.submit(spec)
    wait_for(run, "ClientsSelected", 2)
    gates.wait_reached(*held)
    if is_killed:
        exact_cluster.kill("coordinator")
    gates.open(held[0])
    arrived = wait_for(run, "UpdateReceived", 2)[1].payload
    assert (arrived["round_num"], arrived["client"]) == (1, late)
    gates.open()
    outcome = outcome_of(run)
    closed = [event.payload["accepted"] for event in outcome.of("RoundClosed")]
    assert [each["client"] for each in closed[0]] == [first]
    assert {each["client"]: each["staleness"] for each in closed[1]}[late] == 1
    assert not outcome.status.reproducible
    expected = federated_loop(
        spec,
        ALLOWED,
        lambda number: [each["client"] for each in closed[number - 1] if not each["staleness"]],
        late_of=lambda number: {
            each["client"]: number - each["staleness"]
            for each in closed[number - 1]
            if each["staleness"]
        },
    )
    assert_same_bits(outcome.state, expected.state)


def drawn(seed: int, round_num: int) -> tuple[int, ...]:
    """One of four clients and one more."""
    roster = [ClientBinding(client=n, worker_id=WorkerId("any"), tags=()) for n in range(4)]
    return select(Random(0.25), roster, seed, round_num, 1)


def test_round_without_its_quorum_fails_the_run(client: Client, gates: Gates) -> None:
    spec = federated(
        rounds=1,
        num_clients=2,
        batch_size=64,
        data=user_data("gated_clients", folder=str(gates.folder)),
        options={"quorum": 2, "round_deadline_s": 1.0},
    )
    gates.close("client0-1", "client1-1")
    run = client.submit(spec)
    for _ in run.watch():
        pass
    assert run.status().reason == "round 1: 0 of 2 updates, deadline passed; 2 are needed"

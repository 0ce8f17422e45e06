"""Federations over real processes: bits, order of arrival, and who is left out."""

from collections import Counter
from math import isclose
from typing import Any

import numpy as np
import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.ids import WorkerId
from stratagem.common.strategy import Federated, Random
from stratagem.coordinator.core.facts import ClientBinding
from stratagem.coordinator.strategies.federated.decisions import select
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
from tests.cluster.references import bits_of
from tests.common.observe.scrape import scrape_process
from tests.jobs import user_data
from tests.reference.loops import federated_loop
from tests.reference.nested_rounds import nested_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("rounds count whom they say, in one order, whoever answers when"),
]

HALF = {"method": "Random", "fraction": 0.5}
BY_LABEL: dict[str, Any] = {"partition": {"method": "by_label"}}
ADAM = {"server_optimizer": {"name": "fedadam"}}
CASES: dict[str, dict[str, Any]] = {
    "half of four": {**BY_LABEL, "selection": HALF, "rounds": 4},
    "prox in coded regions": {
        "num_clients": 5,
        "aggregation": {"method": "FedProx", "mu": 0.2},
        "compression": {"codec": "int8"},
        "options": {"regions": {"south": [3, 0], "north": [4, 1, 2]}, "quorum": 3, **ADAM},
    },
    "coded krum": {
        **BY_LABEL,
        "num_clients": 5,
        "options": {"robust": {"name": "krum", "byzantine": 1}},
        "compression": {"codec": "ternary"},
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
    assert_same_bits(outcome.state, bits_of(spec))
    metrics = outcome.status.metrics
    received = [each.payload for each in outcome.of("UpdateReceived")]
    updates = [each for each in received if each["round_num"] == spec.strategy.rounds]
    assert metrics["train.loss_max"] == max(each["loss"] for each in updates)
    norms = [each["metrics"]["train.max_grad_norm"] for each in updates]
    assert metrics["train.max_grad_norm"] == max(norms) > 0
    assert outcome.status.commits[-1].metrics["train.loss"] == metrics["train.loss"]
    if case == "half of four":
        expected = federated_loop(spec, ALLOWED, selected(outcome).__getitem__)
        assert isclose(metrics["train.loss"], expected.losses[-1], rel_tol=1e-12)
    assert len(outcome.digests) == spec.strategy.rounds
    assert outcome.status.reproducible
    verdicts = outcome.of("UpdatesJudged")
    assert len(verdicts) == (3 if case == "coded krum" else 0)
    assert all("1 of 5 updates chosen" in each.sentence for each in verdicts)


def test_a_rule_that_weighs_has_the_weights_of_the_reference(client: Client) -> None:
    spec = federated(**BY_LABEL, options={"robust": {"name": "geometric_median"}})
    outcome = train(client, spec)
    for name, expected in federated_loop(spec, ALLOWED).state.items():
        found = outcome.state[name]
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)
    assert [len(e.payload["scores"]) for e in outcome.of("UpdatesJudged")] == [4, 4, 4]
    assert outcome.digests == train(client, spec).digests


REGIONS = {"north": [4, 0], "east": [5, 1, 2], "west": [3]}


def test_rounds_inside_of_regions_have_the_bits_of_the_tree_and_of_a_plain_loop(
    client: Client,
) -> None:
    sections: dict[str, Any] = {
        "model": "batch_norm_mlp",
        **BY_LABEL,
        "optimizer": {"name": "sgd", "lr": 0.2, "schedule": {"name": "cosine"}},
    }
    inner: dict[str, Any] = {
        "type": "Federated",
        "num_clients": 3,
        "rounds": 1,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
        "options": {"round_deadline_s": 3600, "quorum": 1},
    }
    whole = {**sections, "num_clients": 6}
    flat = federated(**whole, rounds=2, options={"regions": REGIONS})
    options = {"regions": REGIONS, "inner": inner, "quorum": 3, "round_deadline_s": 7200}
    nested = federated(**sections, num_clients=3, rounds=2, options=options)
    assert train(client, nested).digests == train(client, flat).digests
    more = {"regions": REGIONS, "inner": {**inner, "rounds": 2}}
    outcome = train(client, federated(**sections, num_clients=3, rounds=2, options=more))
    in_order = [[1, 2, 5], [0, 4], [3]]
    expected = nested_loop(federated(**whole, rounds=4), ALLOWED, in_order, 2)
    assert_same_bits(outcome.state, expected)
    assert outcome.status.reproducible


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


def test_late_update_enters_the_next_round_though_the_coordinator_is_killed(
    exact_cluster: LocalCluster, client: Client, gates: Gates
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

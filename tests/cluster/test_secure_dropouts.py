"""Clients that lose their keys in mid-round are not in the sum, which is exact without them."""

import hashlib
import json

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import ALLOWED, Gates, assert_same_bits, federated, outcome_of, wait_for
from tests.jobs import user_data
from tests.reference.loops import federated_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("clients that lose their keys are not in the sum, which is exact"),
]

OF_WORKER_1 = {1, 3}
"""Its clients; the other one's update may have been sent before this one's is held up."""


def test_the_masks_of_lost_clients_are_taken_from_the_sum(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    spec = federated(
        num_clients=5,
        rounds=2,
        options={"secure_aggregation": {"threshold": 0.5}},
        data=user_data("gated", folder=str(gates.folder)),
    )
    gates.close("worker-1-batch-1")
    run = client.submit(spec)
    gates.wait_reached("worker-1-batch-1")  # its shares are routed, and its update is not sent
    for file in (exact_cluster.folder / "worker-1" / "secure-worker-1").iterdir():
        file.unlink()
    exact_cluster.kill("worker-1")
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    closed = [event.payload for event in outcome.of("RoundClosed")]
    summed = {c["round_num"]: [a["client"] for a in c["accepted"]] for c in closed}
    assert summed[2] == [0, 1, 2, 3, 4]
    lost = set(range(5)) - set(summed[1])
    assert lost
    assert lost <= OF_WORKER_1
    causes = {e.payload["client"]: e.payload["cause"] for e in outcome.of("UpdateRejected")}
    assert causes == dict.fromkeys(lost, "keys_lost")
    assert not run.status().reproducible
    reference = federated_loop(spec, ALLOWED, clients_of=summed.__getitem__)
    assert_same_bits(outcome.state, reference.state)


def forget_keys(cluster: LocalCluster, worker: str, run_id: str, client: int) -> None:
    """Lose what one client has of its secure round, while the other clients of its worker keep
    theirs, and end the worker's process, which has it in memory."""
    name = hashlib.sha256(json.dumps((run_id, "", client)).encode()).hexdigest()
    (cluster.folder / worker / f"secure-{worker}" / f"{name}.secret").unlink()
    cluster.kill(worker)


def test_twelve_clients_on_a_ring_of_which_two_drop_out_in_different_phases(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    """Client 5 before its update is sent, client 7 when its update is in the sum and it cannot
    open any more."""
    spec = federated(
        num_clients=12,
        rounds=2,
        options={"secure_aggregation": {"threshold": 0.5, "degree": 6}},
        data=user_data("gated_clients", folder=str(gates.folder)),
    )
    gates.close("client5-1", "client6-1")
    run = client.submit(spec)
    gates.wait_reached("client5-1", "client6-1")
    wait_for(run, "UpdateReceived", where=lambda event: event.payload["client"] == 7)
    forget_keys(exact_cluster, "worker-1", run.run_id, 5)
    forget_keys(exact_cluster, "worker-3", run.run_id, 7)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    closed = [event.payload for event in outcome.of("RoundClosed")]
    summed = {c["round_num"]: [a["client"] for a in c["accepted"]] for c in closed}
    assert summed == {1: [c for c in range(12) if c != 5], 2: [*range(12)]}
    causes = {e.payload["client"]: e.payload["cause"] for e in outcome.of("UpdateRejected")}
    assert causes == {5: "keys_lost"}
    reference = federated_loop(spec, ALLOWED, clients_of=summed.__getitem__)
    assert_same_bits(outcome.state, reference.state)


def test_a_round_that_has_lost_too_many_keys_begins_again_with_new_ones(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    spec = federated(
        num_clients=3,
        rounds=2,
        options={"secure_aggregation": {}},
        data=user_data("gated_clients", folder=str(gates.folder)),
    )
    gates.close("client1-1")
    run = client.submit(spec)
    gates.wait_reached("client1-1")
    forget_keys(exact_cluster, "worker-1", run.run_id, 1)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    (again,) = [event.payload for event in outcome.of("RoundRestarted")]
    assert (again["round_num"], again["attempt"]) == (1, 1)
    assert "2 can be in the sum, and 3 are needed to unmask it" in again["reason"]
    assert_same_bits(outcome.state, federated_loop(spec, ALLOWED).state)

"""Clients that lose their keys in mid-round are not in the sum, which is exact without them."""

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import ALLOWED, Gates, assert_same_bits, federated, outcome_of
from tests.jobs import user_data
from tests.reference.loops import federated_loop

pytestmark = pytest.mark.cluster

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

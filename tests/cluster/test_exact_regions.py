"""Federations of federations on real processes: the bits of the tree, and of a plain loop."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import ALLOWED, assert_same_bits, federated, train
from tests.reference.nested_rounds import nested_loop

pytestmark = pytest.mark.cluster

REGIONS = {"north": [4, 0], "east": [5, 1, 2], "west": [3]}
IN_ORDER = [[1, 2, 5], [0, 4], [3]]
SECTIONS: dict[str, Any] = {
    "model": "batch_norm_mlp",
    "partition": {"method": "by_label"},
    "optimizer": {"name": "sgd", "lr": 0.2, "schedule": {"name": "cosine"}},
}


def inside(rounds: int) -> dict[str, Any]:
    return {
        "type": "Federated",
        "num_clients": 3,
        "rounds": rounds,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
        "options": {"round_deadline_s": 3600, "quorum": 1},
    }


def test_one_round_inside_has_the_bits_of_the_tree(client: Client) -> None:
    flat = federated(**SECTIONS, num_clients=6, rounds=2, options={"regions": REGIONS})
    options = {"regions": REGIONS, "inner": inside(1), "quorum": 3, "round_deadline_s": 7200}
    nested = federated(**SECTIONS, num_clients=3, rounds=2, options=options)
    assert train(client, nested).digests == train(client, flat).digests


def test_more_rounds_inside_have_the_bits_of_a_plain_loop(client: Client) -> None:
    nested = federated(
        **SECTIONS, num_clients=3, rounds=2, options={"regions": REGIONS, "inner": inside(2)}
    )
    outcome = train(client, nested)
    flat = federated(**SECTIONS, num_clients=6, rounds=4)
    assert_same_bits(outcome.state, nested_loop(flat, ALLOWED, IN_ORDER, 2))
    assert outcome.status.reproducible

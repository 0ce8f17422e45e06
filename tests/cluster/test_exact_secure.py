"""Secure aggregation over real processes gives the bits of a plain sum of quantised changes."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import ALLOWED, assert_same_bits, federated, train
from tests.reference.loops import federated_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("secure aggregation gives the bits of a plain sum of quantised changes"),
]

RING = "most of seven on a ring, by rows, with a server optimizer"
CASES: dict[str, dict[str, Any]] = {
    RING: {
        "num_clients": 7,
        "selection": {"method": "Random", "fraction": 0.8},
        "options": {
            "server_optimizer": {"name": "fedadam"},
            "secure_aggregation": {
                "degree": 2,
                "weights": "rows",
                "max_rows": 20,
                "threshold": 0.5,
                "bits": 28,
                "clip": 0.5,
            },
        },
    },
    "buffers and numbers without dimension": {
        "model": "batch_norm_mlp",
        "batch_size": 25,
        "options": {"secure_aggregation": {"clip": 0.01}},
    },
}


@pytest.mark.parametrize(
    "case", [RING, pytest.param("buffers and numbers without dimension", marks=pytest.mark.sweep)]
)
def test_bits_of_a_plain_sum(client: Client, case: str) -> None:
    spec = federated(**CASES[case])
    outcome = train(client, spec)
    chosen = {e.payload["round_num"]: e.payload["clients"] for e in outcome.of("ClientsSelected")}
    reference = federated_loop(spec, ALLOWED, clients_of=chosen.__getitem__)
    assert_same_bits(outcome.state, reference.state)
    received = [event.payload for event in outcome.of("UpdateReceived")]
    assert {each["num_samples"] for each in received} == {1}
    assert not any(name.startswith("train.") for name in outcome.status.metrics)

"""Private federations over real processes compute the bits of the reference, for any workers."""

from itertools import pairwise
from typing import Any

import pytest

from stratagem.client.sdk.blocking import Client
from stratagem.common.privacy import accountant
from tests.cluster.jobs import ALLOWED, assert_same_bits, federated, train
from tests.reference.loops import federated_loop
from tests.reference.private_round import PrivateRounds

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("rounds that protect clients compute the bits of the private loop"),
    pytest.mark.skipif(not accountant.is_installed(), reason="needs the extra privacy"),
]

ADAPTIVE = {"quantile": 0.5, "rate": 0.5}


def private(clip: Any = None, **fields: Any) -> dict[str, Any]:
    return {
        "clip": {"norm": 0.5, **(clip or {})},
        "noise_multiplier": 0.3,
        "target": {"delta": 1e-5},
        "noise": "seeded",
        **fields,
    }


CASES: dict[str, dict[str, Any]] = {
    "all of seven": {
        "num_clients": 7,
        "rounds": 4,
        "privacy": private({"adaptive": ADAPTIVE}),
        "options": {"server_optimizer": {"name": "fedadam"}},
    },
    "rounds without clients": {
        "selection": {"method": "Random", "fraction": 0.1},
        "rounds": 4,
        "privacy": private(),
    },
}


@pytest.mark.parametrize(
    "case",
    ["all of seven", *(pytest.param(each, marks=pytest.mark.sweep) for each in [*CASES][1:])],
)
def test_bits_of_the_private_loop(client: Client, case: str) -> None:
    spec = federated(**CASES[case])
    outcome = train(client, spec)
    rounds = PrivateRounds(spec)
    assert_same_bits(outcome.state, federated_loop(spec, ALLOWED, private=rounds).state)
    accounts = [event.payload for event in outcome.of("RoundAccounted")]
    assert [each["clip_norm"] for each in accounts] == rounds.norms[:-1]
    drawn = [each["drawn"] for each in accounts]
    assert drawn == [rounds.clients_of(n) for n in range(1, len(accounts) + 1)]
    spent = [each["epsilon"] for each in accounts]
    assert all(before < after for before, after in pairwise(spent))
    assert outcome.status.metrics["privacy.epsilon"] == spent[-1]
    assert not any(name.startswith("train.") for name in outcome.status.metrics)
    if case == "rounds without clients":
        assert [] in drawn

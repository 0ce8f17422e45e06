"""Robust rules over real processes: their bits, and what they are worth when a client lies."""

from typing import Any

import numpy as np
import pytest

from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import ALLOWED, assert_same_bits, federated, train
from tests.reference.loops import federated_loop

pytestmark = pytest.mark.cluster

ADAM = {"server_optimizer": {"name": "fedadam"}}
EXACT: dict[str, dict[str, Any]] = {
    "median": {"model": "batch_norm_mlp", "robust": {"name": "median"}},
    "trimmed mean": {
        "num_clients": 5,
        "robust": {"name": "trimmed_mean", "trim": 0.2},
        "options": ADAM,
    },
    "krum": {"num_clients": 5, "robust": {"name": "krum", "byzantine": 1}},
    "multi-krum": {"num_clients": 7, "robust": {"name": "multi_krum", "byzantine": 2}},
    "coded krum": {
        "num_clients": 5,
        "robust": {"name": "krum", "byzantine": 1},
        "compression": {"codec": "ternary"},
    },
    "bulyan": {"num_clients": 7, "robust": {"name": "bulyan", "byzantine": 1}},
}
CLOSE: dict[str, dict[str, Any]] = {
    "geometric median": {"robust": {"name": "geometric_median"}},
    "norm bound": {"robust": {"name": "norm_bound", "norm": 0.3}},
}


def spec_of(robust: dict[str, Any], options: dict[str, Any] | None = None, **changes: Any) -> Any:
    options = {"robust": robust, **(options or {})}
    return federated(options=options, partition={"method": "by_label"}, **changes)


@pytest.mark.parametrize("case", EXACT)
def test_bits_of_the_reference(client: Client, case: str) -> None:
    spec = spec_of(**EXACT[case])
    outcome = train(client, spec)
    assert_same_bits(outcome.state, federated_loop(spec, ALLOWED).state)
    assert outcome.status.reproducible
    verdicts = outcome.of("UpdatesJudged")
    assert len(verdicts) == (3 if "krum" in case or case == "bulyan" else 0)
    for verdict in verdicts:
        kept = sum(weight > 0 for weight in verdict.payload["weights"])
        assert kept == {"krum": 1, "coded krum": 1, "multi-krum": 5, "bulyan": 5}[case]
        assert f"{kept} of {spec.strategy.num_clients} updates chosen" in verdict.sentence


@pytest.mark.parametrize("case", CLOSE)
def test_weights_of_the_reference(client: Client, case: str) -> None:
    spec = spec_of(**CLOSE[case])
    outcome = train(client, spec)
    for name, expected in federated_loop(spec, ALLOWED).state.items():
        found = outcome.state[name]
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)
    scores = [event.payload["scores"] for event in outcome.of("UpdatesJudged")]
    assert [len(each) for each in scores] == [4, 4, 4]
    assert outcome.digests == train(client, spec).digests

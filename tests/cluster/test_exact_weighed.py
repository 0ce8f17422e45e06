"""Rounds whose updates count otherwise than by rows, over real processes: their numbers."""

from typing import Any

import numpy as np
import pytest

from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import ALLOWED, Outcome, federated, train
from tests.reference.loops import federated_loop

pytestmark = pytest.mark.cluster

UNEVEN: dict[str, Any] = {"partition": {"method": "dirichlet", "alpha": 0.5}, "batch_size": 6}
"""Clients have different numbers of rows, and take different numbers of steps."""


def spec_of(options: dict[str, Any], model: str = "batch_norm_mlp", **changes: Any) -> Any:
    return federated(model, options=options, **{"partition": {"method": "by_label"}, **changes})


def assert_as_the_reference(outcome: Outcome, spec: Any) -> None:
    for name, expected in federated_loop(spec, ALLOWED).state.items():
        found = outcome.state[name].numpy()
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-7, err_msg=name)


def test_q_fedavg(client: Client) -> None:
    spec = spec_of({"q": 0.5, "local_epochs": 2})
    outcome = train(client, spec)
    assert_as_the_reference(outcome, spec)
    assert outcome.status.reproducible
    assert outcome.digests == train(client, spec).digests
    told = [event.payload["loss_before"] for event in outcome.of("UpdateReceived")]
    assert len(told) == 12
    assert all(loss > 0 for loss in told)
    for judged in outcome.of("UpdatesJudged"):
        assert 0 < sum(judged.payload["weights"]) < 1
        assert "losses before training from" in judged.sentence


def test_fednova(client: Client) -> None:
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    spec = spec_of({"normalize": "fednova"}, optimizer=optimizer, **UNEVEN)
    outcome = train(client, spec)
    assert_as_the_reference(outcome, spec)
    assert outcome.status.reproducible
    steps = [event.payload["num_applied_steps"] for event in outcome.of("UpdateReceived")]
    assert len(set(steps)) > 1


@pytest.mark.sweep
def test_fednova_with_the_term_of_fedprox(client: Client) -> None:
    prox = {"method": "FedProx", "mu": 2.0}
    spec = spec_of({"normalize": "fednova"}, aggregation=prox, **UNEVEN)
    assert_as_the_reference(train(client, spec), spec)

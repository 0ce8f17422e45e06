"""Rounds whose updates count otherwise than by rows, over real processes: their numbers."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import ALLOWED, Outcome, assert_same_bits, federated, train
from tests.reference.loops import federated_loop
from tests.reference.personal_rounds import personal_rounds
from tests.reference.scaffold_rounds import Scaffold

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("updates that count otherwise than by rows have the numbers of the papers"),
]

UNEVEN: dict[str, Any] = {"partition": {"method": "dirichlet", "alpha": 0.5}, "batch_size": 6}
"""Clients have different numbers of rows, and take different numbers of steps."""


def spec_of(options: dict[str, Any], model: str = "batch_norm_mlp", **changes: Any) -> Any:
    return federated(model, options=options, **{"partition": {"method": "by_label"}, **changes})


def assert_as_the_reference(outcome: Outcome, spec: Any) -> None:
    assert_close(outcome, federated_loop(spec, ALLOWED).state)


def assert_close(outcome: Outcome, state: Mapping[str, Tensor]) -> None:
    for name, expected in state.items():
        found = outcome.state[name].numpy()
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-7, err_msg=name)
    assert outcome.state.keys() == state.keys()


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


def selected(outcome: Outcome) -> Callable[[int], list[int]]:
    """The clients of each round of a run."""
    drawn = {e.payload["round_num"]: e.payload["clients"] for e in outcome.of("ClientsSelected")}
    return lambda round_num: list(drawn[round_num])


def test_scaffold_with_simulated_clients_of_which_some_are_drawn(client: Client) -> None:
    half = {"method": "Random", "fraction": 0.5}
    rounds: dict[str, Any] = {"num_clients": 7, "rounds": 5, "selection": half, **UNEVEN}
    outcome = train(client, spec_of({"control": "scaffold"}, "mlp", **rounds))
    expected = Scaffold(spec_of({}, "mlp", **rounds), ALLOWED, selected(outcome))
    assert_same_bits(outcome.state, expected.state)
    assert outcome.status.reproducible
    times = Counter(
        number for e in outcome.of("ClientsSelected") for number in e.payload["clients"]
    )
    assert max(times.values()) > 1


def test_what_clients_keep_goes_with_what_becomes_of_updates(client: Client) -> None:
    spec = spec_of({"personal": ["3.*"], "normalize": "fednova"}, evaluation=None, **UNEVEN)
    outcome = train(client, spec)
    assert_close(outcome, personal_rounds(spec, ALLOWED, ["3.*"])[0].state)
    assert outcome.status.reproducible

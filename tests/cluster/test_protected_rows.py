"""Protected rows over real processes: the numbers of the loop over rows, and budgets that end."""

import pytest
import torch

from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec
from stratagem.common.privacy import accountant
from stratagem.common.strategy import Federated
from stratagem.worker.data.datasets import Gather
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.data.sources import ClientShare, DataSources, load_data
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.cluster.jobs import ALLOWED, MOMENTUM, federated, train
from tests.jobs import user_data
from tests.reference.loops import Prepared, SetRates, federated_loop
from tests.reference.private_rows import private_steps

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("rows are protected by the loop over rows, until budgets end"),
    pytest.mark.skipif(not accountant.is_installed(), reason="needs the extra privacy"),
]

NUM_STEPS = 2 * 3
"""Of a round: two epochs of a client's 12 or 13 rows, 5 at a time."""


def train_rows(
    job: JobSpec,
    entrypoints: EntryPoints,
    prepared: Prepared,
    client: int,
    round_num: int,
    _numerics: int,
    _rates: SetRates | None,
) -> tuple[int, float, bool]:
    assert isinstance(job.strategy, Federated)
    share = ClientShare(client, job.strategy.num_clients)
    data = load_data(job, entrypoints, DataSources(), share)["train"]
    gather = Gather(torch.float32, torch.device("cpu"))
    x, y = gather(data, torch.arange(len(data)), "reading", BatchKeys(("row",)))
    private_steps(job, prepared[0], (x, y), client, round_num)
    return len(data), 0.0, True


def spent(num_rows: int, num_rounds: int) -> float:
    return accountant.epsilon_after(num_rounds * NUM_STEPS, 1.5, 5 / num_rows, 1e-5)


def test_rounds_are_those_of_the_loop_until_no_client_has_budget_left(client: Client) -> None:
    """Rows of the first of two clients, which has one more, are drawn more rarely."""
    target = spent(13, 2)
    assert spent(12, 1) < target < min(spent(12, 2), spent(13, 3))
    spec = federated(
        num_clients=2,
        data=user_data("classes", num_rows=25),
        rounds=5,
        batch_size=5,
        optimizer=MOMENTUM,
        options={"local_epochs": 2, "server_optimizer": {"name": "fedavgm"}},
        evaluation={"split": "test", "metrics": ["accuracy"]},
        privacy={
            "unit": "row",
            "clip": {"norm": 0.5},
            "noise_multiplier": 1.5,
            "target": {"epsilon": target, "delta": 1e-5},
            "noise": "seeded",
        },
    )
    outcome = train(client, spec)
    assert outcome.status.reason == (
        f"stopped early after 2 rounds: privacy budget: up to {target:.3g} of {target:g} spent by "
        "a client, and one more round would cost each of them more"
    )
    first, second = (event.payload for event in outcome.of("ClientsSelected"))
    assert (first["clients"], second["clients"]) == ([0, 1], [0])
    assert second["excused"] == [{"reason": "privacy budget spent", "clients": [1]}]
    expected = federated_loop(
        spec,
        ALLOWED,
        num_rounds=2,
        train_client=train_rows,
        clients_of=lambda round_num: [0, 1] if round_num == 1 else [0],
    )
    for name, tensor in expected.state.items():
        torch.testing.assert_close(outcome.state[name], tensor, rtol=1e-4, atol=1e-6)
    for event in outcome.of("UpdateReceived"):
        costs = event.payload["spent"]
        num_rows, num_rounds = event.payload["num_samples"], event.payload["round_num"]
        assert costs["epsilon"] == spent(num_rows, num_rounds)
        assert costs["next_epsilon"] == spent(num_rows, num_rounds + 1)
        assert costs["accountant"].startswith("dp-accounting")
        assert event.payload["num_steps"] == NUM_STEPS
        assert not event.payload["metrics"]
    assert outcome.status.metrics["privacy.epsilon"] == target
    assert not any(name.startswith("train.") for name in outcome.status.metrics)

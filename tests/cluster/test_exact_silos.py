"""Federated over silos on real processes: each silo's update has the bits of the sharded loop."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.strategy import DataParallel, Federated, ModelParallel
from stratagem.coordinator.strategies.federated.silos import client_job
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.models.build import build_model
from tests.cluster.jobs import (
    ALLOWED,
    MOMENTUM,
    assert_same_bits,
    data_parallel,
    federated,
    model_parallel,
    train,
)
from tests.reference import loops as reference
from tests.reference.loops import sharded_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("a silo of several workers updates as one client, whatever it is inside"),
]

MICRO_BATCH = 5


def silos_loop(
    spec: JobSpec,
    monkeypatch: pytest.MonkeyPatch,
    losses: dict[int, list[float]] | None = None,
) -> dict[str, Tensor]:
    """Rounds of sharded loops that start from the global state, averaged by rows in float64.

    losses: gets those of each client's steps.
    """
    strategy = spec.strategy
    assert isinstance(strategy, Federated)
    inner = strategy.options.inner
    assert isinstance(inner, DataParallel | ModelParallel)
    num_shards = inner.num_replicas if isinstance(inner, DataParallel) else 1
    of_pipeline = MICRO_BATCH if isinstance(inner, ModelParallel) else None
    model = build_model(spec, ALLOWED, device=torch.device("cpu"), fresh=True)
    world = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def from_world(*args: Any, **kwargs: Any) -> torch.nn.Module:
        made = build_model(*args, **kwargs)
        made.load_state_dict(world)
        return made

    monkeypatch.setattr(reference, "build_model", from_world)
    for round_num in range(1, strategy.rounds + 1):
        updates = []
        for client in range(strategy.num_clients):
            job = client_job(spec, client, round_num)
            num_rows = len(load_data(job, ALLOWED, DataSources())["train"])
            trained = sharded_loop(job, ALLOWED, num_shards, micro_batch_size=of_pipeline)
            if losses is not None:
                losses.setdefault(client, []).extend(trained.losses)
            updates.append(reference.Update(num_rows, dict(trained.state)))
        means = {name: reference._mean_of(name, updates, CURRENT) for name in world}
        world = {name: mean.to(world[name].dtype) for name, mean in means.items()}
    return world


def silos(num_replicas: int = 2, options: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    inner = {"inner": data_parallel(num_replicas), **(options or {})}
    return federated(**{"num_clients": 2, "rounds": 2, "options": inner, **changes})


def test_bits_of_averaged_sharded_loops(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    by_label = {"method": "by_label"}
    spec = silos(model="dropout_mlp", partition=by_label, options={"local_epochs": 2})
    outcome = train(client, spec)
    assert_same_bits(outcome.state, silos_loop(spec, monkeypatch))
    assert outcome.status.reproducible
    formed = [e.payload for e in outcome.of("MembersFormed") if e.payload["party"]]
    assert {len(each["members"]) for each in formed} == {2}
    assert len({m["worker_id"] for each in formed for m in each["members"]}) == 4


@pytest.mark.sweep
def test_the_history_of_a_silo_counts_the_steps_of_all_rounds(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: dict[int, list[float]] = {}
    spec = silos(rounds=2, options={"local_epochs": 2}, recording={"client_steps": True})
    silos_loop(spec, monkeypatch, losses=losses)
    run = client.submit(spec)
    run.result()
    for number in (0, 1):
        loss = run.history("train.loss", f"client{number}")[f"client{number}:train.loss"]
        assert loss.step.tolist() == [*range(1, len(losses[number]) + 1)]
        assert loss.last.tolist() == losses[number]


@pytest.mark.sweep
def test_silos_that_are_pipelines(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two silos of two stages each, on four workers."""
    cut = [("0", "tag:any"), ("1 2", "tag:any")]
    stages = model_parallel(cut, protocol="Pipeline", micro_batch_size=MICRO_BATCH)
    spec = federated(num_clients=2, rounds=2, optimizer=MOMENTUM, options={"inner": stages})
    outcome = train(client, spec)
    assert_same_bits(outcome.state, silos_loop(spec, monkeypatch))
    formed = [e.payload for e in outcome.of("MembersFormed") if e.payload["party"]]
    assert {len(each["members"]) for each in formed} == {2}

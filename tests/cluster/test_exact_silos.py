"""Federated over silos on real processes: each silo's update has the bits of the sharded loop."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.client.sdk.blocking_client import Client
from stratagem.common.job import JobSpec
from stratagem.common.numerics.numerics_rules import CURRENT
from stratagem.common.strategy import DataParallel, Federated, ModelParallel
from stratagem.coordinator.strategies.client_parties.silos import client_job
from stratagem.worker.data.data_sources import DataSources, load_data
from stratagem.worker.models.model_builder import build_model
from tests.cluster.jobs import (
    ALLOWED,
    MOMENTUM,
    assert_same_bits,
    data_parallel,
    federated,
    model_parallel,
    outcome_of,
    train,
    wait_for,
)
from tests.gan_jobs import TURNS, gan
from tests.jobs import user_data
from tests.reference import loops as reference
from tests.reference import turns_loop as turns_reference
from tests.reference.evaluated_steps import plateau_loop
from tests.reference.loops import SetRates, sharded_loop

pytestmark = pytest.mark.cluster

MICRO_BATCH = 5


def silos_loop(
    spec: JobSpec,
    monkeypatch: pytest.MonkeyPatch,
    num_rounds: int | None = None,
    set_rates: SetRates | None = None,
    losses: dict[int, list[float]] | None = None,
) -> dict[str, Tensor]:
    """Rounds of sharded loops that start from the global state, averaged by rows in float64.

    set_rates: sets the rates of a round, counted from 0. losses: gets those of each client's steps.
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
    monkeypatch.setattr(turns_reference, "build_model", from_world)
    for round_num in range(1, (num_rounds or strategy.rounds) + 1):
        updates = []
        for client in range(strategy.num_clients):
            job = client_job(spec, client, round_num)
            num_rows = len(load_data(job, ALLOWED, DataSources())["train"])
            of_round = None
            if set_rates is not None:
                of_round = partial(_in_round, set_rates, round_num)
            if job.turns is not None:
                num_steps = (job.epochs or 0) * math.ceil(num_rows / job.batch_size)
                trained = turns_reference.turns_loop(job, ALLOWED, num_shards, num_steps)
            else:
                trained = sharded_loop(
                    job, ALLOWED, num_shards, micro_batch_size=of_pipeline, set_rates=of_round
                )
                if losses is not None:
                    losses.setdefault(client, []).extend(trained.losses)
            updates.append(reference.Update(num_rows, dict(trained.state)))
        means = {name: reference._mean_of(name, updates, CURRENT) for name in world}
        world = {name: mean.to(world[name].dtype) for name, mean in means.items()}
    return world


def _in_round(
    set_rates: SetRates, round_num: int, optimizer: torch.optim.Optimizer, _step: int
) -> None:
    set_rates(optimizer, round_num - 1)


CASES: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": MOMENTUM},
    "by label, two epochs": {
        "partition": {"method": "by_label"},
        "options": {"local_epochs": 2},
        "model": "dropout_mlp",
    },
    "adam, clients by factory": {
        "optimizer": {"name": "adam", "lr": 0.01},
        "data": user_data("poisoned"),
    },
    "turns": gan(turns=[TURNS[0], {**TURNS[1], "optimizer": MOMENTUM}]),
}


def silos(num_replicas: int = 2, options: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    inner = {"inner": data_parallel(num_replicas), **(options or {})}
    return federated(**{"num_clients": 2, "rounds": 2, "options": inner, **changes})


@pytest.mark.parametrize("case", CASES)
def test_bits_of_averaged_sharded_loops(
    client: Client, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    spec = silos(**CASES[case])
    outcome = train(client, spec)
    assert_same_bits(outcome.state, silos_loop(spec, monkeypatch))
    assert outcome.status.reproducible
    formed = [e.payload for e in outcome.of("MembersFormed") if e.payload["party"]]
    assert {len(each["members"]) for each in formed} == {2}
    assert len({m["worker_id"] for each in formed for m in each["members"]}) == 4


def test_the_history_of_a_silo_counts_the_steps_of_all_rounds(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: dict[int, list[float]] = {}
    spec = silos(rounds=3, options={"local_epochs": 2}, recording={"client_steps": True})
    silos_loop(spec, monkeypatch, losses=losses)
    run = client.submit(spec)
    run.result()
    for number in (0, 1):
        loss = run.history("train.loss", f"client{number}")[f"client{number}:train.loss"]
        assert loss.step.tolist() == [*range(1, len(losses[number]) + 1)]
        assert loss.last.tolist() == losses[number]


@pytest.mark.sweep
def test_rows_of_a_silo_that_stand_for_several_steps_go_on_over_its_rounds(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: dict[int, list[float]] = {}
    spec = silos(rounds=3, batch_size=2, options={"local_epochs": 53})
    silos_loop(spec, monkeypatch, losses=losses)
    assert any(len(each) % 2 for each in losses.values()), "a row has steps of two rounds"
    run = client.submit(spec)
    run.result()
    for number in (0, 1):
        loss = run.history("train.loss", f"client{number}")[f"client{number}:train.loss"]
        of_client = losses[number]
        pairs = [of_client[place : place + 2] for place in range(0, len(of_client), 2)]
        assert loss.stride == 2
        assert loss.last.tolist() == [pair[-1] for pair in pairs]
        assert loss.min.tolist() == [min(pair) for pair in pairs]
        assert loss.count.tolist() == [len(pair) for pair in pairs]


def test_rates_that_fall_on_a_plateau(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = {"name": "plateau", "factor": 0.3, "patience": 0, "min_delta": 0.5}
    groups = [
        {"name": "biases", "match": ["*.bias"], "lr": 0.2},
        {"name": "head", "match": ["2.weight"], "optimizer": {"name": "adam", "lr": 0.1}},
    ]
    evaluation = {"split": "test", "best": "loss", "mode": "min"}
    spec = silos(
        rounds=8,
        optimizer={"name": "sgd", "lr": 0.4, "schedule": schedule, "groups": groups},
        evaluation=evaluation,
    )

    def loop(num_rounds: int, set_rates: SetRates) -> dict[str, Tensor]:
        return silos_loop(spec, monkeypatch, num_rounds, set_rates)

    rates, state = plateau_loop(spec, ALLOWED, loop, list(range(1, 9)))
    assert len({tuple(each) for each in rates}) > 2
    assert_same_bits(train(client, spec).state, state)


def test_silos_that_are_pipelines(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two silos of two stages each, on four workers."""
    cut = [("0", "tag:any"), ("1 2", "tag:any")]
    stages = model_parallel(cut, protocol="Pipeline", micro_batch_size=MICRO_BATCH)
    spec = federated(num_clients=2, rounds=2, optimizer=MOMENTUM, options={"inner": stages})
    outcome = train(client, spec)
    assert_same_bits(outcome.state, silos_loop(spec, monkeypatch))
    formed = [e.payload for e in outcome.of("MembersFormed") if e.payload["party"]]
    assert {len(each["members"]) for each in formed} == {2}


def test_a_silo_that_loses_a_worker_ends_with_the_same_bits(
    client: Client, exact_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = silos(rounds=3, optimizer=MOMENTUM)
    run = client.submit(spec)
    (formed,) = wait_for(run, "MembersFormed", where=lambda e: e.payload["party"] == "client1")
    wait_for(run, "UpdateReceived")
    exact_cluster.kill(formed.payload["members"][0]["worker_id"])
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert_same_bits(outcome.state, silos_loop(spec, monkeypatch))

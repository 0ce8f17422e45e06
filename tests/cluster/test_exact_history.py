"""The step history through the real thing: the values of the reference loop, to the bit, on any
number of workers. That they survive every crash is seen in tests/crash."""

from typing import Any

import numpy as np
import pytest

from stratagem.client.history.step_history import History
from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    Gates,
    data_parallel,
    gossip,
    model_parallel,
    park,
    population,
)
from tests.jobs import job, user_model
from tests.reference.loops import plain_loop, sharded_loop

pytestmark = pytest.mark.cluster

MODEL = user_model("dropout_mlp")
SECTIONS: dict[str, Any] = {
    "optimizer": {**ADAMW, "schedule": {"name": "cosine"}},
    "callbacks": "tests.userland.callbacks:Logs",
}
TIMES = {"time.wall_s", "time.rows_per_s", "time.exchange_wait_s"}
CUT = model_parallel([("0 1", "tag:any"), ("2 3", "tag:any")])


def exact(history: History) -> dict[str, bytes]:
    return {n: each.columns.to_bytes() for n, each in history.items() if not each.observed}


def history_of(client: Client, spec: JobSpec, **asked: Any) -> History:
    run = client.submit(spec)
    run.result()
    return run.history(**asked)


def test_every_step_is_what_the_reference_has_on_any_number_of_workers(
    exact_cluster: LocalCluster, client: Client, lot: Gates
) -> None:
    spec = job(MODEL, strategy=data_parallel(3), **SECTIONS)
    losses = sharded_loop(spec, ALLOWED, 3).losses
    history = history_of(client, spec)
    assert {name for name, each in history.items() if each.observed} == TIMES
    loss, norm, seen = (history[f"train.{name}"] for name in ("loss", "grad_norm", "seen.loss"))
    assert (loss.stride, loss.step.tolist()) == (1, [*range(1, len(losses) + 1)])
    assert loss.last.tolist() == loss.min.tolist() == loss.max.tolist() == losses
    assert not loss.provisional.any()
    assert seen.step.tolist() == loss.step.tolist(), "the last step's is there, too"
    assert seen.last.tolist() == (loss.last + norm.last).tolist()
    assert history["train.third.loss"].step.tolist() == [1, 4, 7, 10]
    assert history["train.lr"].last[0] > history["train.lr"].last[-1] > 0.0

    by_server = job(MODEL, strategy=data_parallel(3, "ParameterServer"), **SECTIONS)
    assert exact(history_of(client, by_server)) == exact(history)
    for worker in ("worker-3", "worker-2", "worker-1"):
        park(exact_cluster, lot, worker)
        if worker != "worker-3":
            assert exact(history_of(client, spec)) == exact(history)


def test_rows_that_stand_for_several_steps_do_not_depend_on_where_segments_end(
    client: Client,
) -> None:
    sections: dict[str, Any] = {"steps": 2100, "checkpoint": {"every": "333 steps"}}
    spec = job(**sections)
    loss = history_of(client, spec, series="train.loss")["train.loss"]
    losses = np.array(plain_loop(spec, ALLOWED).losses).reshape(-1, 2)
    assert (loss.stride, len(loss)) == (2, 1050)
    assert loss.last.tolist() == losses[:, 1].tolist()
    assert loss.min.tolist() == losses.min(axis=1).tolist()
    assert loss.max.tolist() == losses.max(axis=1).tolist()
    assert set(loss.count) == {2}


def test_stages_and_members_have_a_history_and_what_the_job_leaves_out_has_none(
    client: Client,
) -> None:
    spec = job(MODEL, strategy=CUT)
    staged = history_of(client, spec)
    assert staged["train.loss"].last.tolist() == sharded_loop(spec, ALLOWED, 1).losses

    run = client.submit(population(size=2, generations=2))
    run.result()
    members = run.history("train.loss", "*")
    assert sorted(each.party for each in members.values()) == ["member0", "member1"]
    assert all(each.step.tolist() == [*range(1, 7)] for each in members.values())

    assert not history_of(client, job(MODEL, recording={"steps": False}))
    unobserved = history_of(client, job(MODEL, recording={"observed": False}))
    assert not TIMES & unobserved.keys()
    assert "train.loss" in unobserved
    assert not history_of(client, job(MODEL, strategy=gossip(2))), "each node has a loss of its own"

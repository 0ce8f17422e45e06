"""The step history through the real thing: the values of the reference loop, to the bit, on any
number of workers. That they survive every crash is seen in tests/crash."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from stratagem.client.course.step_history import History, MeasuredStep, measured_step
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    Gates,
    data_parallel,
    events_of,
    federated,
    gossip,
    model_parallel,
    park,
    population,
    train,
    wait_for,
)
from tests.jobs import job, user_data, user_model
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import sharded_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise(
        "the history of each step is the reference's, and survives a killed worker"
    ),
]

MODEL = user_model("dropout_mlp")
SECTIONS: dict[str, Any] = {
    "optimizer": {**ADAMW, "schedule": {"name": "cosine"}},
    "callbacks": "tests.userland.callbacks:Logs",
}
TIMES = {"time.wall_s", "time.rows_per_s", "time.exchange_wait_s"}
OWN = ("busy_s", "wait_s", "memory_bytes")
PLACES = [("0 1", "tag:any"), ("2 3", "tag:any")]
CUT = model_parallel(PLACES)


def exact(history: History) -> dict[str, bytes]:
    return {n: each.columns.to_bytes() for n, each in history.items() if not each.observed}


def history_of(client: Client, spec: JobSpec, **asked: Any) -> History:
    run = client.submit(spec)
    run.result()
    return run.history(**asked)


def test_every_step_is_what_the_reference_has(client: Client) -> None:
    spec = job(MODEL, strategy=data_parallel(3), **SECTIONS)
    losses = sharded_loop(spec, ALLOWED, 3).losses
    history = history_of(client, spec)
    of_workers = {name for name in history if name.startswith("worker.")}
    assert {name for name, each in history.items() if each.observed} == TIMES | of_workers
    assert sorted(name.rpartition(".")[2] for name in of_workers) == sorted(OWN * 3)
    assert all((history[name].last >= 0.0).all() for name in of_workers)
    loss, norm, seen = (history[f"train.{name}"] for name in ("loss", "grad_norm", "seen.loss"))
    assert (loss.stride, loss.step.tolist()) == (1, [*range(1, len(losses) + 1)])
    assert loss.last.tolist() == loss.min.tolist() == loss.max.tolist() == losses
    assert not loss.provisional.any()
    assert seen.step.tolist() == loss.step.tolist(), "the last step's is there, too"
    assert seen.last.tolist() == (loss.last + norm.last).tolist()
    assert history["train.third.loss"].step.tolist() == [1, 4, 7, 10]
    assert history["train.lr"].last[0] > history["train.lr"].last[-1] > 0.0


@pytest.mark.sweep
def test_every_step_is_the_same_on_any_number_of_workers(
    exact_cluster: LocalCluster, client: Client, lot: Gates
) -> None:
    spec = job(MODEL, strategy=data_parallel(3), **SECTIONS)
    history, nodes = exact(history_of(client, spec)), gossiped(client)
    by_server = job(MODEL, strategy=data_parallel(3, "ParameterServer"), **SECTIONS)
    assert exact(history_of(client, by_server)) == history
    for worker in ("worker-3", "worker-2", "worker-1"):
        park(exact_cluster, lot, worker)
        if worker != "worker-3":
            assert exact(history_of(client, spec)) == history
            assert gossiped(client) == nodes


def gossiped(client: Client) -> dict[str, bytes]:
    """The exact series of nodes that gossip, after they were compared with the reference's."""
    spec = job(MODEL, strategy=gossip(3), optimizer=SECTIONS["optimizer"])
    expected = gossip_loop(spec, ALLOWED)
    outcome = train(client, spec)
    ends = [event.payload for event in outcome.of("SegmentFinished")]
    history = outcome.run.history(parties="*")
    for node, losses in enumerate(expected.of_nodes):
        assert history[f"node/{node}:train.loss"].last.tolist() == losses
        assert len(history[f"node/{node}:train.lr"]) == len(losses)
    distance = history["train.consensus_distance"]
    assert distance.step.tolist() == [end["step"] for end in ends]
    measured = [end["metrics"]["train.consensus_distance"] for end in ends]
    assert distance.last.tolist() == measured
    assert "train.loss" not in history, "each node has a loss of its own"
    return exact(history)


@pytest.mark.sweep
def test_stages_and_members_have_a_history_and_what_the_job_leaves_out_has_none(
    client: Client,
) -> None:
    spec = job(MODEL, strategy=CUT)
    losses = sharded_loop(spec, ALLOWED, 1).losses
    staged = history_of(client, spec, parties="*")
    assert staged["train.loss"].last.tolist() == losses
    for stage in ("stage/0", "stage/1"):
        own = {each.name: each for each in staged.values() if each.party == stage}
        assert own.keys() == {*OWN, "span_s"}
        assert all(each.observed for each in own.values())
        assert len(own["busy_s"]) == len(losses)
        assert (own["busy_s"].last + own["wait_s"].last <= own["span_s"].last).all()
    pipelined = model_parallel(PLACES, protocol="Pipeline", micro_batch_size=2)
    for told in (staged, history_of(client, job(MODEL, strategy=pipelined), parties="*")):
        measured = measured_step(told, 2)
        assert measured is not None
        assert (measured.step, measured.is_whole) == (len(losses), True)
        assert measured.lanes == {0: (0,), 1: (1,)}
        assert measured.error_s == 0.0, "workers of one machine have one clock"
        check_causes(measured)
    steps, bubble = staged.bubble()
    assert steps.tolist() == [*range(1, len(losses) + 1)]
    assert ((bubble > 0.0) & (bubble < 1.0)).all()

    run = client.submit(population(size=2, generations=2))
    run.result()
    members = run.history("train.loss", "*")
    assert sorted(each.party for each in members.values()) == ["member0", "member1"]
    assert all(each.step.tolist() == [*range(1, 7)] for each in members.values())

    assert not history_of(client, job(MODEL, recording={"steps": False}))
    unobserved = history_of(client, job(MODEL, recording={"observed": False}))
    assert not any(each.observed for each in unobserved.values())
    assert "train.loss" in unobserved


def check_causes(measured: MeasuredStep) -> None:
    """Nothing is done before what it needs, and each worker does one thing after the other."""
    first, second = (
        {(each.kind, each.micro_batch): each for each in measured.actions[stage]}
        for stage in (0, 1)
    )
    numbers = [number for kind, number in first if kind == "forward"]
    assert numbers == [*range(len(numbers))]
    assert first.keys() == second.keys()
    for number in numbers:
        forward, backward = ("forward", number), ("backward", number)
        assert first[forward].end_s <= second[forward].begin_s
        assert second[forward].end_s <= second[backward].begin_s
        assert second[backward].end_s <= first[backward].begin_s
        assert first[backward].wait_s > 0.0
    for its in measured.actions.values():
        assert [each.kind for each in its][-2:] == ["exchange", "optimizer"]
        assert all(a.end_s <= b.begin_s + 2e-6 for a, b in pairwise(its))


@pytest.mark.sweep
def test_steps_of_clients_survive_the_worker_that_is_killed_in_a_round(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    spec = federated(
        batch_size=4,
        data=user_data("gated_clients", folder=str(gates.folder)),
        callbacks=SECTIONS["callbacks"],
        recording={"client_steps": True},
    )
    undisturbed = client.submit(spec)
    rounds = [e.payload for e in events_of(undisturbed) if e.kind == "UpdateReceived"]
    expected = undisturbed.history(parties="client*")
    for number in range(4):
        loss, norm, rate, seen = (
            expected[f"client{number}:train.{name}"]
            for name in ("loss", "grad_norm", "lr", "seen.loss")
        )
        assert loss.step.tolist() == rate.step.tolist() == [*range(1, 10)]
        assert seen.last.tolist() == (loss.last + norm.last).tolist()
        means = {each["round_num"]: each["loss"] for each in rounds if each["client"] == number}
        num_rows = 12 if number < 2 else 11
        weights = np.array([4, 4, num_rows - 8])
        for round_num, mean in means.items():
            of_round = loss.last[3 * round_num - 3 : 3 * round_num]
            assert np.dot(of_round, weights) / num_rows == pytest.approx(mean, rel=1e-12)
    observed = {each.name for each in expected.values() if each.observed}
    assert observed == {"time.wall_s", "time.rows_per_s"}

    gates.close("client2-5")  # the second step of round 2
    run = client.submit(spec)
    gates.wait_reached("client2-5")
    wait_for(run, "UpdateReceived", 7)
    done = run.history("train.loss", "client*")
    assert [len(each) for each in done.values()] == [6, 6, 3, 6]
    assert not any(each.provisional.any() for each in done.values())
    (assigned,) = wait_for(run, "ClientsAssigned", where=lambda e: e.payload["round_num"] == 2)
    plays = {
        each["client"]: each["member"]["worker_id"] for each in assigned.payload["assignments"]
    }
    exact_cluster.kill(plays[2])
    gates.open()
    run.result()
    exact_cluster.wait_ready()
    assert exact(run.history(parties="client*")) == exact(expected)
    assert not history_of(client, federated(rounds=1), parties="*"), "only where it is asked for"

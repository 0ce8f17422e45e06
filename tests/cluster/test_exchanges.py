"""Data parallelism beyond its bits: coded exchanges and what they have sent, sums in another order,
replicas that differ, and parameters that are sent once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stratagem.client.course.views import Phase
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import RunFailedError
from tests.cluster.jobs import (
    ALLOWED,
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    train,
)
from tests.common.observe.scrape import labelled
from tests.common.observe.scrape import scrape_process as scraped
from tests.jobs import job, user_data
from tests.reference.compressed_loop import compressed_loop
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop, sharded_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("what is exchanged is coded, counted, compared and sent once"),
]

OWN = {"entrypoint": "tests.userland.optimizers:SignMomentum", "lr": 0.01, "beta": 0.8}
ROWS = user_data("classes", num_rows=50)


def test_residuals_are_part_of_the_commit(client: Client, tmp_path: Path) -> None:
    spec = job("dropout_mlp", compression="ternary", strategy=data_parallel(5), optimizer=OWN)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, compressed_loop(spec, ALLOWED, 5).state)
    stored = load_file(outcome.run.download(tmp_path / "final.safetensors"))
    shards = {name.split("/")[1] for name in stored if name.startswith("residual/")}
    assert shards == {f"shard{shard}" for shard in range(5)}


@pytest.mark.parametrize(
    ("codec", "num_replicas"),
    [
        ("ternary", 3),  # messages go to everybody
        ("fp16", 7),  # sums come back, and go up too: messages would be more bytes
    ],
)
def test_parameter_server_has_the_bits_of_the_compressed_loop(
    client: Client, codec: str, num_replicas: int
) -> None:
    strategy = data_parallel(num_replicas, "ParameterServer")
    spec = job("dropout_mlp", compression=codec, strategy=strategy, data=ROWS)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, compressed_loop(spec, ALLOWED, num_replicas).state)
    assert outcome.status.engine == f"server, {codec}"
    metrics = outcome.status.metrics
    if num_replicas == 3:
        assert 0 < metrics["train.sent_bytes"] < metrics["train.uncompressed_bytes"]


def test_coded_updates_have_the_bits_of_the_loop(client: Client) -> None:
    codec = {"codec": "int8", "stochastic": True}
    spec = federated("batch_norm_mlp", compression=codec, num_clients=3, batch_size=25)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, federated_loop(spec, ALLOWED).state)
    traffic = [event.payload["traffic"] for event in outcome.of("UpdateReceived")]
    assert all(0 < each["sent_bytes"] < each["uncompressed_bytes"] for each in traffic)
    sent = [each["sent_bytes"] for each in traffic[-3:]]
    assert outcome.status.metrics["train.sent_bytes"] == sum(sent)  # of the last round


def test_coded_gossip_has_the_bits_of_the_loop(client: Client) -> None:
    spec = job("dropout_mlp", compression="low_rank", strategy=gossip(3), data=ROWS)
    outcome = train(client, spec)
    expected = gossip_loop(spec, ALLOWED)
    assert_same_bits(outcome.state, expected.mean)
    assert outcome.status.engine == "gloo, low_rank"
    metrics = outcome.status.metrics
    assert metrics["train.consensus_distance"] == pytest.approx(expected.distance, rel=1e-12)
    assert 0 < metrics["train.sent_bytes"] < metrics["train.uncompressed_bytes"]


@pytest.mark.parametrize("all_reduce", ["ring", "native"])
def test_sums_in_another_order_are_close_and_marked(client: Client, all_reduce: str) -> None:
    strategy = {**data_parallel(3), "options": {"all_reduce": all_reduce}}
    spec = job(strategy=strategy, execution={"deterministic": False})
    run = train(client, spec)
    assert run.status.engine == f"gloo {all_reduce}"
    assert not run.status.reproducible
    expected = sharded_loop(spec, ALLOWED, 3)
    for name, tensor in run.state.items():
        assert torch.allclose(tensor, expected.state[name], rtol=1e-4, atol=1e-5), name


def test_replicas_that_differ_fail_the_run(client: Client) -> None:
    run = client.submit(job("acting_models:Stray", strategy=data_parallel(2)))
    with pytest.raises(RunFailedError) as caught:
        run.result()
    status = run.status()
    assert status.phase is Phase.FAILED
    assert status.reason.startswith("the replicas differ after segment 1: worker-")
    assert status.reason in str(caught.value)
    assert status.segment == 0


STATES = labelled(direction="received", kind="state")


def received(cluster: LocalCluster) -> float:
    return scraped(cluster, "coordinator")["stratagem_stream_bytes_total"].get(STATES, 0.0)


def test_parameters_that_do_not_train_are_sent_once(
    client: Client, exact_cluster: LocalCluster
) -> None:
    spec = job(
        "frozen_start",
        steps=7,
        optimizer={"name": "sgd", "lr": 0.1},
        strategy=data_parallel(2),
        checkpoint={"every": "2 steps"},
    )
    before = received(exact_cluster)
    state = train(client, spec).state
    trained = sum(state[f"2.{name}"].nbytes for name in ("weight", "bias"))
    frozen = sum(state[f"0.{name}"].nbytes for name in ("weight", "bias"))
    assert frozen > 2 * trained
    # The model as it was built, and four commits, of which the first one has none before it. On a
    # busy machine a worker has overwritten the snapshot before when it is asked, and sends all.
    num_whole, rest = divmod(received(exact_cluster) - before - 5 * trained, frozen)
    assert rest == 0
    assert 2 <= num_whole < 5
    assert_same_bits(state, sharded_loop(spec, ALLOWED, 2).state)

"""A commit takes from the one before what has not changed, and has the bits of the reference."""

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import ALLOWED, assert_same_bits, data_parallel, train
from tests.common.observe.scrape import labelled
from tests.common.observe.scrape import scrape_process as scraped
from tests.jobs import job
from tests.reference.loops import sharded_loop

pytestmark = pytest.mark.cluster

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

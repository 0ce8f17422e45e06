"""Data sets whose rows are fetched one by one, over real processes that are killed."""

import signal

import psutil
import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.common.base.errors import UserCodeError
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    federated,
    model_parallel,
    outcome_of,
    train,
    wait_for,
)
from tests.jobs import job, user_data
from tests.patience import PATIENCE_S
from tests.reference.loops import federated_loop, sharded_loop

pytestmark = pytest.mark.cluster

COLLATE = "tests.userland.data:jittered"


def test_a_member_killed_in_the_middle_of_an_epoch_changes_no_bit(
    exact_cluster: LocalCluster, client: Client, gates: Gates, lot: Gates
) -> None:
    data = {**user_data("augmented", folder=str(gates.folder)), "collate": COLLATE}
    spec = job(
        "dropout_mlp",
        data=data,
        accumulation={"micro_batch_size": 3},
        strategy=data_parallel(3),
    )
    gates.close("row-13")  # of each member: six are read when it loads, and five in each step
    run = client.submit(spec)
    gates.wait_reached("row-13")
    (formed,) = wait_for(run, "MembersFormed")
    exact_cluster.kill(formed.payload["members"][1]["worker_id"], signal.SIGKILL)
    gates.open()
    outcome = outcome_of(run)
    assert len(outcome.of("MembersFormed")) > 1
    assert outcome.status.reproducible
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 3).state)


def test_rows_that_differ_between_workers_are_refused_and_those_of_clients_are_not(
    exact_cluster: LocalCluster, client: Client, lot: Gates
) -> None:
    said = r"data\.train: row 0 is not the same as on the worker that has built the model"
    for spec in (job(data=user_data("unseeded")), federated(data=user_data("unseeded"))):
        with pytest.raises(UserCodeError, match=said):
            train(client, spec)
    allowed = job(data=user_data("unseeded"), execution={"deterministic": False})
    assert train(client, allowed).status.phase == "COMPLETED"


def readers_of(cluster: LocalCluster, worker: str) -> list[psutil.Process]:
    process = psutil.Process(cluster.processes[worker].pid)
    return [each for each in process.children() if "stratagem.worker.data.reader" in each.cmdline()]


@pytest.mark.sweep
def test_a_reader_and_a_worker_with_readers_killed_change_no_bit(
    exact_cluster: LocalCluster, client: Client, gates: Gates, lot: Gates
) -> None:
    data = {**user_data("augmented", folder=str(gates.folder)), "collate": COLLATE}
    spec = job(
        "dropout_mlp",
        data={**data, "readers": 2, "prefetch": 3},
        accumulation={"micro_batch_size": 3},
        strategy=data_parallel(2),
    )
    gates.close("row-5")  # of each process: a worker itself reads four when it loads
    run = client.submit(spec)
    gates.wait_reached("row-5")
    (formed,) = wait_for(run, "MembersFormed")
    first, second = (member["worker_id"] for member in formed.payload["members"])
    readers_of(exact_cluster, first)[0].kill()
    left = readers_of(exact_cluster, second)
    exact_cluster.kill(second, signal.SIGKILL)
    psutil.wait_procs(left, timeout=PATIENCE_S)
    assert not [each for each in left if each.is_running() and each.status() != "zombie"]
    gates.open()
    outcome = outcome_of(run)
    assert len(outcome.of("MembersFormed")) > 1
    assert outcome.status.reproducible
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2).state)


@pytest.mark.parametrize("readers", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_federated_clients_have_the_bits_of_the_loop(client: Client, readers: int) -> None:
    spec = federated(
        "dropout_mlp",
        data={**user_data("augmented"), "collate": COLLATE, "readers": readers},
        batch_size=5,
    )
    assert_same_bits(train(client, spec).state, federated_loop(spec, ALLOWED).state)


@pytest.mark.parametrize(("order", "readers"), [("shuffle", 1), ("sequential", 0)])
def test_stages_of_a_pipeline_have_the_bits_of_the_loop(
    client: Client, order: str, readers: int
) -> None:
    """The first stage fetches the inputs, the last one the targets."""
    cut = {"0 1": "worker-0", "2 3": "worker-1"}
    strategy = model_parallel(cut, protocol="Pipeline", micro_batch_size=3)
    data = {**user_data("augmented"), "collate": COLLATE, "order": order, "readers": readers}
    spec = job("dropout_mlp", data=data, strategy=strategy)
    expected = sharded_loop(spec, ALLOWED, 1, micro_batch_size=3)
    assert_same_bits(train(client, spec).state, expected.state)

"""Worker processes come and go under ever new names, and a coordinator takes all of them."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.process import template
from tests.crash.rig import until
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("workers come and go under ever new names"),
]

MAX_WORKERS = 2


@contextmanager
def coordinator(**settings: str) -> Iterator[tuple[LocalCluster, Client]]:
    environment = {f"STRATAGEM_COORDINATOR_{name.upper()}": text for name, text in settings.items()}
    environment["STRATAGEM_COORDINATOR_MAX_WORKERS"] = str(MAX_WORKERS)
    with LocalCluster(workers=0, environment=environment) as cluster, cluster.client() as client:
        yield cluster, client


@contextmanager
def worker(cluster: LocalCluster, folder: Path, name: str) -> Iterator[template.Process]:
    """A process that is registered."""
    command = [
        *(sys.executable, "-m", "stratagem.worker", "--coordinator", cluster.address),
        *("--name", name, "--threads", "1"),
    ]
    with (folder / f"{name}.log").open("ab") as log:
        process = template.start(command, dict(os.environ), log, with_input=False)
    try:
        with cluster.client() as client:
            until(lambda: name in alive(client), f"{name} is registered")
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def alive(client: Client) -> set[str]:
    return {each.worker_id for each in client.workers() if each.is_alive}


def test_twice_as_many_names_as_there_are_places_join_and_leave(tmp_path: Path) -> None:
    with coordinator() as (cluster, client):
        for batch in (("w0", "w1"), ("w2", "w3")):
            with ExitStack() as stack:
                processes = [stack.enter_context(worker(cluster, tmp_path, n)) for n in batch]
                assert {each.worker_id for each in client.workers()} == set(batch)
                for process in processes:
                    process.send_signal(signal.SIGTERM)
                assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
                assert client.workers() == (), "who has left is forgotten at once"
        said = cluster.log_tail("coordinator")
    assert said.count("drained after SIGTERM") == 4
    assert "is lost" not in said


def test_the_dead_take_no_place_and_are_forgotten_in_time(tmp_path: Path) -> None:
    quick = {"worker_ttl_s": "2", "heartbeat_interval_s": "0.5", "forget_workers_after": "1s"}
    with coordinator(**quick) as (cluster, client):
        for batch in (("w0", "w1"), ("w2", "w3")):
            with ExitStack() as stack:
                for name in batch:
                    stack.enter_context(worker(cluster, tmp_path, name))
            until(lambda: not alive(client), "their leases have ended")
        until(lambda: client.workers() == (), "all are forgotten")
        cluster.kill("coordinator")
        cluster.wait_restarted("coordinator", 1)
        assert client.workers() == ()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_twice_at_once_drains(tmp_path: Path, number: signal.Signals) -> None:
    with coordinator() as (cluster, client), worker(cluster, tmp_path, "w0") as process:
        process.send_signal(number)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        # At once, unless its farewell was not answered in time, which it waits for shortly.
        until(lambda: not any(each.is_alive for each in client.workers()), "it has left")

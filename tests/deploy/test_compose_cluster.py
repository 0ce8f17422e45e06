"""The compose cluster on a real engine, with faults: each run has the bits of an undisturbed one.

`make cluster-test` runs this. The reference is a cluster of processes of this machine, which the
other tests hold against the plain loop.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stratagem.client import LocalCluster
from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.common.base.errors import StratagemError
from stratagem.common.identity.certificates import init
from stratagem.common.identity.tls import TlsFiles
from stratagem.common.job import load_job
from tests.crash.rig import Outcome, await_event, committed, outcome_of, until
from tests.deploy.stack import Stack, running_stack
from tests.repository import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "examples" / "digits.yaml"
LONG = ("epochs=20000", "batch_size=16", "model.kwargs.hidden=256")
"""No machine comes to its end within a test, which stops it once it has seen what it waits for."""
NUM_WORKERS = 3
CONTAINER_USER = 10001
"""Of deploy/docker/Dockerfile."""
LEASE_TTL_S = 10.0
"""Of the coordinator's lead and of its workers, unless set otherwise."""
PATIENCE_S = 90.0


@pytest.fixture(scope="module", name="stack")
def _stack() -> Iterator[Stack]:
    with running_stack(NUM_WORKERS) as stack:
        yield stack


@pytest.fixture(scope="module", name="client")
def _client(stack: Stack) -> Iterator[Client]:
    with Client(stack.address, patience_s=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module", name="expected")
def _expected() -> Outcome:
    """What processes of this machine make of the example."""
    with reference() as client:
        return outcome_of(client.submit(load_job(EXAMPLE)))


@contextmanager
def reference() -> Iterator[Client]:
    """A cluster of processes of this machine."""
    cluster = LocalCluster(workers=2, threads=1, import_path=[ROOT], allow=["examples.*:*"])
    with cluster, cluster.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _settled(stack: Stack, client: Client) -> None:
    """All workers are there when a test begins."""
    stack.up(NUM_WORKERS)
    until(lambda: alive(client) == stack.worker_ids(), "all workers are alive", PATIENCE_S)


def alive(client: Client) -> set[str]:
    return {each.worker_id for each in client.workers() if each.is_alive}


def commits_up_to(run: RunHandle, segment: int) -> None:
    """Wait until a run has committed a segment."""
    await_event(run, "SegmentCommitted", lambda event: event.payload["segment"] >= segment)


@contextmanager
def stopped(client: Client) -> Iterator[RunHandle]:
    """The long run, which is stopped at the end of the block."""
    run = client.submit(load_job(EXAMPLE, LONG))
    try:
        yield run
    finally:
        if not run.status().phase.is_final:
            run.cancel()


@contextmanager
def training(client: Client) -> Iterator[RunHandle]:
    """The long run, which has committed something; after the block it goes on until it has
    committed more, and all that it has committed has the bits of an undisturbed run."""
    with stopped(client) as run:
        commits_up_to(run, 5)
        yield run
        commits_up_to(run, run.status().segment + 2)
    digests, metrics = committed(run.events())
    newest = max(segment for _, segment in digests)
    assert newest >= 7
    with reference() as undisturbed, stopped(undisturbed) as same:
        commits_up_to(same, newest)
        same_digests, same_metrics = committed(same.events())
    assert digests == {key: same_digests[key] for key in digests}
    measured = [key for key in metrics if key[1] <= newest - 2]  # later ones may be cut off
    assert {key: metrics[key] for key in measured} == {key: same_metrics[key] for key in measured}
    assert len(measured) >= newest - 2


def member_of(run: RunHandle) -> str:
    return run.status().worker_ids[-1]


def test_the_command_line_trains_a_job(stack: Stack, client: Client, expected: Outcome) -> None:
    status = run_example(stack.address)
    assert (status["phase"], status["engine"]) == ("COMPLETED", "gloo")
    assert outcome_of(client.get("example")) == expected


def test_workers_that_share_a_certificate(expected: Outcome, tmp_path: Path) -> None:
    """As many as are wanted, with deploy/compose.tls.yml; others have no way in."""
    certs = tmp_path / "certs"
    init(certs, workers=[], pools=["compose"], clients=["me"], hosts=["coordinator"])
    if os.getuid():
        pytest.skip("only root can give keys to the user of the containers")
    for name in ("coordinator.key", "pool-compose.key"):
        os.chown(certs / name, CONTAINER_USER, -1)
    mine = TlsFiles(certs / "ca.crt", certs / "client-me.crt", certs / "client-me.key")
    with (
        running_stack(NUM_WORKERS, certs) as stack,
        Client(stack.address, patience_s=PATIENCE_S, tls=mine) as client,
    ):
        until(stack.serves, "the coordinator leads", PATIENCE_S)
        names = {f"{each}.compose" for each in stack.worker_ids()}
        until(lambda: alive(client) == names, "all workers are alive", PATIENCE_S)
        flags = ["--tls-ca", str(mine.ca), "--tls-cert", str(mine.cert), "--tls-key", str(mine.key)]
        status = run_example(stack.address, *flags)
        assert (status["phase"], status["engine"]) == ("COMPLETED", "grpc")
        assert status["submitted_by"] == "client me"
        assert outcome_of(client.get("example")) == expected
        with pytest.raises(StratagemError), Client(stack.address) as stranger:
            stranger.workers()


def run_example(address: str, *flags: str) -> dict[str, Any]:
    """Train it by the command line of this machine, as the run `example`; its last status."""
    program = [sys.executable, "-m", "stratagem.program", "run", str(EXAMPLE)]
    options = ["--coordinator", address, "--run-id", "example", "--format", "json", *flags]
    done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    status: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return status


def test_a_worker_is_killed(stack: Stack, client: Client) -> None:
    with training(client) as run:
        stack.kill(stack.worker(member_of(run)))
        await_memberships(run, 2)
    until(lambda: alive(client) == stack.worker_ids(), "the engine restarts it", PATIENCE_S)


def test_a_worker_loses_its_network(stack: Stack, client: Client) -> None:
    with training(client) as run:
        member = member_of(run)
        with stack.disconnected(stack.worker(member)):
            until(lambda: member not in alive(client), "the worker is lost", PATIENCE_S)
            await_memberships(run, 2)
    until(lambda: member in alive(client), "the worker is back", PATIENCE_S)


def test_the_coordinator_is_frozen_beyond_its_lease(stack: Stack, client: Client) -> None:
    with training(client) as run, stack.paused(stack.coordinator()):
        threading.Event().wait(1.5 * LEASE_TTL_S)  # it is the time that matters here
    assert num_memberships(run) == 1


def test_the_coordinator_is_killed(stack: Stack, client: Client) -> None:
    with training(client):
        stack.kill(stack.coordinator())


def test_workers_leave_and_join(stack: Stack, client: Client) -> None:
    with training(client) as run:
        stack.up(1)
        until(lambda: len(run.status().worker_ids) == 1, "one worker does all", PATIENCE_S)
        commits_up_to(run, run.status().segment + 1)
        stack.up(NUM_WORKERS)
        until(lambda: len(run.status().worker_ids) == 2, "another one joins", PATIENCE_S)


def num_memberships(run: RunHandle) -> int:
    return sum(
        event.kind == "MembersFormed" and bool(event.payload["members"]) for event in run.events()
    )


def await_memberships(run: RunHandle, count: int) -> None:
    until(lambda: num_memberships(run) >= count, "members are formed anew", PATIENCE_S)

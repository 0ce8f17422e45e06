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
from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.run_handle import RunHandle
from stratagem.common.base.errors import StratagemError
from stratagem.common.identity.certificates import init
from stratagem.common.identity.tls_files import TlsFiles
from stratagem.common.job import JobSpec, load_job
from tests.crash.rig import Outcome, await_event, events_of, outcome_of, until
from tests.deploy.stack import Stack, running_stack
from tests.repository import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "examples" / "digits.yaml"
# Long enough for what happens in the middle of it.
LONG = ("epochs=80", "batch_size=16", "model.kwargs.hidden=256")
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
def _expected(stack: Stack) -> dict[tuple[str, ...], Outcome]:
    """What processes of this machine make of the example, short and long."""
    cluster = LocalCluster(workers=2, threads=1, import_path=[ROOT], allow=["examples.*:*"])
    with cluster, cluster.client() as client:
        return {
            overrides: outcome_of(client.submit(load_job(EXAMPLE, overrides)))
            for overrides in ((), LONG)
        }


@pytest.fixture(autouse=True)
def _settled(stack: Stack, client: Client) -> None:
    """All workers are there when a test begins."""
    stack.up(NUM_WORKERS)
    until(lambda: alive(client) == stack.worker_ids(), "all workers are alive", PATIENCE_S)


def alive(client: Client) -> set[str]:
    return {each.worker_id for each in client.workers() if each.is_alive}


def long_job() -> JobSpec:
    return load_job(EXAMPLE, LONG)


@contextmanager
def training(client: Client) -> Iterator[RunHandle]:
    """A long run that has committed something; stopped if the block leaves it unfinished."""
    run = client.submit(long_job())
    try:
        await_event(run, "SegmentCommitted", lambda event: event.payload["segment"] >= 5)
        yield run
    finally:
        if not run.status().phase.is_final:
            run.cancel()


def member_of(run: RunHandle) -> str:
    return run.status().worker_ids[-1]


def test_the_command_line_trains_an_example(
    stack: Stack, client: Client, expected: dict[tuple[str, ...], Outcome]
) -> None:
    status = run_example(stack.address)
    assert (status["phase"], status["engine"]) == ("COMPLETED", "gloo")
    assert outcome_of(client.get("example")) == expected[()]


def test_workers_that_share_a_certificate(
    expected: dict[tuple[str, ...], Outcome], tmp_path: Path
) -> None:
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
        assert outcome_of(client.get("example")) == expected[()]
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


def test_a_worker_is_killed(
    stack: Stack, client: Client, expected: dict[tuple[str, ...], Outcome]
) -> None:
    with training(client) as run:
        container = stack.worker(member_of(run))
        stack.kill(container)
        assert outcome_of(run) == expected[LONG]
    until(lambda: alive(client) == stack.worker_ids(), "the engine restarts it", PATIENCE_S)


def test_a_worker_loses_its_network(
    stack: Stack, client: Client, expected: dict[tuple[str, ...], Outcome]
) -> None:
    with training(client) as run:
        member = member_of(run)
        with stack.disconnected(stack.worker(member)):
            until(lambda: member not in alive(client), "the worker is lost", PATIENCE_S)
        assert outcome_of(run) == expected[LONG]
    until(lambda: member in alive(client), "the worker is back", PATIENCE_S)


def test_the_coordinator_is_frozen_beyond_its_lease(
    stack: Stack, client: Client, expected: dict[tuple[str, ...], Outcome]
) -> None:
    with training(client) as run:
        with stack.paused(stack.coordinator()):
            threading.Event().wait(1.5 * LEASE_TTL_S)  # it is the time that matters here
        assert outcome_of(run) == expected[LONG]
        assert sum(event.kind == "MembersFormed" for event in events_of(run)) == 1


def test_the_coordinator_is_killed(
    stack: Stack, client: Client, expected: dict[tuple[str, ...], Outcome]
) -> None:
    with training(client) as run:
        stack.kill(stack.coordinator())
        assert outcome_of(run) == expected[LONG]


def test_workers_leave_and_join(
    stack: Stack, client: Client, expected: dict[tuple[str, ...], Outcome]
) -> None:
    with training(client) as run:
        stack.up(1)
        until(lambda: len(run.status().worker_ids) == 1, "one worker does all", PATIENCE_S)
        stack.up(NUM_WORKERS)
        until(lambda: len(run.status().worker_ids) == 2, "another one joins", PATIENCE_S)
        assert outcome_of(run) == expected[LONG]

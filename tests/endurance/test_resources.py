"""What runs out under a coordinator: disk, the journal's lock, descriptors, sound bytes, a folder.

One cluster for all of it: a coordinator whose data lie on a disk of 16 MB, and two workers. After
each fault the same processes go on, and the run ends with the bits of an undisturbed one.
"""

import resource
import shutil
import signal
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from stratagem.client.course.views import Phase
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import LimitError, StratagemError
from tests.cluster.jobs import gates_in
from tests.crash.failure_logs import LOGS
from tests.crash.hands import Hands, Process, hands
from tests.crash.jobs import ALL_REDUCE, LOCAL, federated, gated, paced
from tests.crash.rig import Outcome, await_event, outcome_of, until
from tests.endurance.disks import cut_off, fill, mounted
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.promise("What runs out under a coordinator stops no run, or is said."),
]

FLAGS = ("--lease-ttl-s", "5", "--worker-ttl-s", "8", "--heartbeat-interval-s", "0.5")
LOCKED_S = 12.0
"""Longer than any lease."""
NUM_STEPS = 20
FEW = 64
HELD = "batch-7"
"""A gate at step 4, after the first commit."""


class Site:
    """The cluster, and what its runs should come to."""

    def __init__(self, started: Hands, disk: Path) -> None:
        self.disk = disk
        self.started = started
        self.coordinator: Process = started.coordinator("coordinator")
        self.address = self.coordinator.address
        self.workers = [started.worker(f"w{n}", self.address) for n in range(2)]
        for worker in self.workers:
            assert worker.address
        self.client = Client(self.address)
        self.gates = started.folder / "gates"
        self.gates.mkdir()
        self.job = gated(ALL_REDUCE, self.gates, NUM_STEPS)
        self.expected: Outcome = outcome_of(self.client.submit(self.job))

    def said(self, words: str) -> bool:
        return words in self.coordinator.log_file.read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    disk = folder / "data"
    disk.mkdir()
    with ExitStack() as stack:
        stack.enter_context(mounted(disk, "size=16m"))
        made = Site(stack.enter_context(hands(folder, *FLAGS)), disk)
        yield made
        made.client.close()


def full_disk(site: Site, go_on: Callable[[], None]) -> None:
    """Until the journal could not be written, and a user's data neither."""
    filler = fill(site.disk)
    go_on()
    stays_full(site, site.disk, "database or disk is full", "the journal has met the full disk")
    data = {"train": (np.zeros((1000, 1000), np.float32), np.zeros(1000, np.int64))}
    with pytest.raises(LimitError, match="the coordinator's disk is full"):
        site.client.submit({**paced(LOCAL, 0.0), "data": {}}, data=data)
    filler.unlink()


def stays_full(site: Site, disk: Path, words: str, what: str) -> None:
    """Until the coordinator has said so; what it removes meanwhile makes room for nothing else."""

    def is_said() -> bool:
        fill(disk)
        return site.said(words)

    until(is_said, what)


def locked_journal(site: Site, go_on: Callable[[], None]) -> None:
    other = sqlite3.connect(site.disk / "journal.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    go_on()
    threading.Event().wait(LOCKED_S)
    other.execute("ROLLBACK")
    other.close()
    assert site.said("database is locked")


def few_descriptors(site: Site, go_on: Callable[[], None]) -> None:
    """More connections than it may have, until something could not be opened."""
    pid = site.coordinator.popen.pid
    host, _, port = site.address.rpartition(":")
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (FEW, before[1]))
    with ExitStack() as stack:
        for _ in range(2 * FEW):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
        go_on()
        until(lambda: site.said("Too many open files"), "descriptors have run out")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.fixture(autouse=True)
def _logs(request: pytest.FixtureRequest) -> None:
    if "site" in request.fixturenames:
        request.node.stash[LOGS] = request.getfixturevalue("site").started.logs


@pytest.mark.parametrize("fault", [full_disk, locked_journal, few_descriptors])
def test_a_run_outlives_it_with_the_same_processes_and_bits(
    site: Site, fault: Callable[[Site, Callable[[], None]], None]
) -> None:
    starts = {each.worker_id: each.incarnation for each in site.client.workers()}
    with gates_in(site.gates) as gates:
        gates.close(HELD)
        run = site.client.submit(site.job)
        await_event(run, "SegmentCommitted")
        gates.wait_reached(HELD)
        fault(site, gates.open)
    assert outcome_of(run).digests == site.expected.digests
    assert not site.coordinator.has_ended
    assert {each.worker_id: each.incarnation for each in site.client.workers()} == starts
    assert all(each.is_alive for each in site.client.workers())
    assert not site.said("Traceback")
    assert not site.said("no heartbeat for")


def test_a_run_whose_state_is_cut_off_says_so_and_goes_on_from_a_sound_copy(site: Site) -> None:
    with gates_in(site.gates) as gates:
        gates.close(HELD)
        run = site.client.submit(site.job)
        await_event(run, "SegmentCommitted")
        gates.wait_reached(HELD)
        for worker in site.workers:
            worker.send(signal.SIGSTOP)  # so that no sound state is committed after the damage
    with cut_off(site.disk / "blobs"):
        for worker in site.workers:
            worker.kill()
        # Whoever takes their places must be given the state.
        site.workers = [site.started.worker(f"w{n}", site.address) for n in range(2)]
        until(lambda: run.status().phase is Phase.FAILED, "the run has failed")
        assert "its bytes have another digest; put a sound copy" in run.status().reason
    run.resume()
    assert outcome_of(run).digests == site.expected.digests


def test_a_round_waits_while_there_is_no_room_for_its_updates(site: Site) -> None:
    """The spool has a disk of its own, which is full from the first update on."""
    job = gated(federated(rounds=3), site.gates)
    expected = outcome_of(site.client.submit(job))
    starts = {each.worker_id: each.incarnation for each in site.client.workers()}
    spool = site.disk / "spool"
    with mounted(spool, "size=1m"), gates_in(site.gates) as gates:
        gates.close("client2-2")
        run = site.client.submit(job)
        await_event(run, "UpdateReceived")
        filler = fill(spool)
        gates.open()
        stays_full(site, spool, "No space left on device", "an update has met the full disk")
        local = site.client.submit(paced(LOCAL, 0.0))  # whose states lie elsewhere
        assert local.result().status.phase is Phase.COMPLETED
        assert run.status().phase is Phase.RUNNING
        filler.unlink()
        assert outcome_of(run).digests == expected.digests
    assert not site.coordinator.has_ended
    assert {each.worker_id: each.incarnation for each in site.client.workers()} == starts
    assert not site.said("Traceback")


def test_a_coordinator_whose_folder_is_removed_acknowledges_nothing_more(tmp_path: Path) -> None:
    with hands(tmp_path, *FLAGS) as started:
        process = started.coordinator("coordinator")
        with Client(process.address, patience_s=0.0) as client:
            client.submit(paced(LOCAL, 0.0), "before")
            shutil.rmtree(tmp_path / "data")
            with pytest.raises(StratagemError):
                client.submit(paced(LOCAL, 0.0), "after")
        assert process.popen.wait(PATIENCE_S) == 1
        assert "journal.sqlite was removed or replaced" in process.log_file.read_text()


def test_a_coordinator_on_a_disk_that_is_read_only_says_so_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with mounted(tmp_path / "data", "size=1m,ro"), hands(tmp_path) as started:
        process = started.coordinator("coordinator")
        assert process.popen.wait(PATIENCE_S) == 1
        text = process.log_file.read_text()
        assert "coordinator ends" in text
        assert "Read-only file system" in text
        assert "Traceback" not in text  # its servers are stopped

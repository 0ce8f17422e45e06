"""The wall clocks of real processes jump in the middle of runs, and nothing comes of it."""

import sqlite3
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest

from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.common.base.errors import UnauthenticatedError
from stratagem.common.identity.certificates import make_authority
from stratagem.common.identity.tls import Role, TlsFiles
from tests.cluster.jobs import gates_in
from tests.crash.failure_logs import LOGS
from tests.crash.hands import Hands, Process, hands
from tests.crash.jobs import ALL_REDUCE, PARAMETER_SERVER, Job, federated, gated
from tests.crash.rig import Outcome, events_of, outcome_of
from tests.endurance.wall_clocks import WallClocks
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.promise("No run depends on what the wall clocks of its processes say.")

SWEEP, SOAK = pytest.mark.sweep, pytest.mark.soak
HOUR_S, DAY_S = 3600.0, 86400.0
JUMPS_S = (HOUR_S, -HOUR_S, DAY_S)
"""Of the clock's place, and not of the step: from an hour before to a day after is a step, too."""
NUM_STEPS = 24
WORKERS = ("w0", "w1")
FLAGS = ("--lease-ttl-s", "60", "--worker-ttl-s", "60", "--heartbeat-interval-s", "0.5")
"""Less than the clocks jump, and longer than a busy machine stands still."""
DEADLINE: Job = {
    **federated(num_clients=2, rounds=3),
    "options": {"quorum": 1, "round_deadline_s": 600},
}
HELD = (("batch-9",), ("batch-17",), ("batch-25",))
HELD_CLIENTS = tuple((f"client0-{number}", f"client1-{number}") for number in (1, 4, 7))
"""Where a run stands when the clocks jump: at steps 5, 9 and 13, and in each round."""


def jobs(gates: Path) -> dict[str, Job]:
    return {
        "AllReduce": gated(ALL_REDUCE, gates, NUM_STEPS),
        "ParameterServer": gated(PARAMETER_SERVER, gates, NUM_STEPS),
        "Federated": gated(DEADLINE, gates),
    }


class Site:
    def __init__(self, started: Hands, clocks: WallClocks) -> None:
        self.started, self.clocks = started, clocks
        self.gates = started.folder / "gates"
        self.gates.mkdir()
        self.jobs = jobs(self.gates)
        self.coordinator: Process = started.coordinator("coordinator")
        self.workers = [started.worker(name, self.coordinator.address) for name in WORKERS]
        assert all(worker.address for worker in self.workers)
        self.client = Client(self.coordinator.address)
        self.expected: dict[str, Outcome] = {}
        self.facts: dict[str, list[str]] = {}
        for name, document in self.jobs.items():
            run = self.client.submit(document)
            self.expected[name] = outcome_of(run)
            self.facts[name] = kinds_of(run)

    def said(self, words: str) -> bool:
        return any(words in each.log_file.read_text() for each in self.started.processes)

    def journal(self, query: str) -> list[float]:
        with sqlite3.connect(self.started.folder / "data" / "journal.sqlite") as connection:
            return [value for (value,) in connection.execute(query)]


def kinds_of(run: RunHandle) -> list[str]:
    """What was journaled until the end. Clients may answer in any order, evaluations too."""
    return sorted(each.kind for each in events_of(run) if each.kind != "RunReleased")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("clocks")
    clocks = WallClocks(folder)
    with hands(folder, *FLAGS) as started:
        started.environment_of = clocks.environment_of
        made = Site(started, clocks)
        yield made
        made.client.close()


@pytest.fixture(autouse=True)
def _logs(request: pytest.FixtureRequest) -> None:
    if "site" in request.fixturenames:
        request.node.stash[LOGS] = request.getfixturevalue("site").started.logs


ALL = ("coordinator", *WORKERS)
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "leader-AllReduce": (("coordinator",), "AllReduce"),
    "leader-Federated": (("coordinator",), "Federated"),
    "worker-ParameterServer": (("w1",), "ParameterServer"),
    "worker-Federated": (("w1",), "Federated"),
    "all-AllReduce": (ALL, "AllReduce"),
}
"""Whose clocks jump, and the job meanwhile."""


@pytest.mark.parametrize(
    ("who", "job"),
    [
        pytest.param(*case, marks=SWEEP if name == "all-AllReduce" else SOAK, id=name)
        for name, case in CASES.items()
    ],
)
def test_nothing_comes_of_a_clock_that_jumps(site: Site, who: tuple[str, ...], job: str) -> None:
    starts = {each.worker_id: each.incarnation for each in site.client.workers()}
    held = HELD_CLIENTS if job == "Federated" else HELD
    try:
        with gates_in(site.gates) as gates:
            gates.close(*chain(*held))
            began_s = time.time()
            run = site.client.submit(site.jobs[job])
            submitted_s = time.time()
            for seconds, names in zip(JUMPS_S, held, strict=True):
                gates.wait_reached(*names)
                site.clocks.move(seconds, *who)
                gates.open(*names)
        outcome = outcome_of(run)
        ended_s = time.time()
        status = run.status()
        assert outcome.digests == site.expected[job].digests
        assert status.reproducible, "a deadline has passed early"
        assert kinds_of(run) == site.facts[job], "something more has happened than usually does"
        assert {each.worker_id: each.incarnation for each in site.client.workers()} == starts
        assert all(each.silent_s < PATIENCE_S for each in site.client.workers())
        # What is shown is what the coordinator's clock said.
        ahead_s = DAY_S if "coordinator" in who else 0.0
        assert began_s - 0.1 < status.submitted_at_s < submitted_s + 0.1
        assert status.ended_at_s is not None
        assert began_s <= status.ended_at_s - ahead_s <= ended_s
    finally:
        site.clocks.move(0.0, *ALL)
    assert not site.coordinator.has_ended
    for words in ("no heartbeat for", "is lost", "Traceback", "deadline"):
        assert not site.said(words), words
    # The leader's clock has not moved with it.
    times_s = site.journal("SELECT time_s FROM event ORDER BY position")
    assert times_s == sorted(times_s)
    assert times_s[-1] < HOUR_S
    assert set(site.journal("SELECT term FROM event")) == {1}


@SOAK
def test_certificates_are_valid_by_the_clock_and_only_new_connections_ask(tmp_path: Path) -> None:
    """The clock jumps past their end and to before their beginning; runs go on all the same."""
    authority = make_authority(tmp_path / "certs")
    valid = timedelta(hours=2)
    coordinator = authority.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"], valid)
    workers = {name: authority.issue(Role.WORKER, name, valid=valid) for name in WORKERS}
    alice = authority.issue(Role.CLIENT, "alice", valid=valid)
    clocks = WallClocks(tmp_path)
    with hands(tmp_path, *FLAGS, *flags_of(coordinator)) as started:
        started.environment_of = clocks.environment_of
        started.worker_flags_of = lambda name: flags_of(workers[name])
        address = started.coordinator("coordinator").address
        assert all([started.worker(name, address).address for name in WORKERS])
        with Client(address, tls=alice) as client:
            document = gated(ALL_REDUCE, tmp_path, NUM_STEPS)
            expected = outcome_of(client.submit(document))
            starts = {each.worker_id: each.incarnation for each in client.workers()}
            for seconds in (DAY_S, -DAY_S):
                with gates_in(tmp_path) as gates:
                    gates.close("batch-9")
                    run = client.submit(document)
                    gates.wait_reached("batch-9")
                    clocks.move(seconds, *ALL)
                assert outcome_of(run).digests == expected.digests
                with (
                    pytest.raises(UnauthenticatedError, match="does not accept the certificate"),
                    Client(address, tls=alice) as stranger,
                ):
                    stranger.workers()
                clocks.move(0.0, *ALL)
                with Client(address, tls=alice) as again:
                    assert all(each.is_alive for each in again.workers())
            assert outcome_of(client.submit(document)).digests == expected.digests
            assert {each.worker_id: each.incarnation for each in client.workers()} == starts


def flags_of(files: TlsFiles) -> tuple[str, ...]:
    return ("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca))

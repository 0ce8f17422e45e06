"""Two coordinators on one PostgreSQL: one leads, the other takes over; and the server restarts."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stratagem.client.course.views import Event, Progress
from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.common.base.errors import StandbyError
from tests.cluster.jobs import Gates
from tests.crash.failure_logs import LOGS
from tests.crash.hands import EXIT_FENCED, free_address, hands
from tests.crash.jobs import ALL_REDUCE, FED_AVG, LOCAL, PARAMETER_SERVER, Job, gated, paced
from tests.crash.pair import Pair
from tests.crash.rig import await_event, await_step, events_of, outcome_of
from tests.patience import PATIENCE_S
from tests.postgres import Postgres

pytestmark = pytest.mark.promise("A standby takes over with the runs, the workers and the clients.")

TERMS = "SELECT term FROM event ORDER BY position"
LEASE_TTL_S = 4.0
KEEPALIVE_S = 40.0
"""A connection to a frozen process is held for dead after this."""
STEPS = 24


@contextmanager
def pair_of(folder: Path, postgres: Postgres, *worker_flags: str) -> Iterator[Pair]:
    journal = postgres.new_schema()
    flags = ("--lease-ttl-s", str(LEASE_TTL_S), "--worker-ttl-s", "15", "--journal", journal)
    with hands(folder, *flags) as started:
        started.worker_flags_of = lambda _name: worker_flags
        a, b = free_address(), free_address()
        leader = started.coordinator("a", listen=a)
        workers = [started.worker(f"w{n}", f"{b},{a}") for n in range(2)]
        assert leader.address == a
        standby = started.coordinator("b", listen=b)
        assert all(worker.address for worker in workers)
        yield Pair(started, journal, leader, standby, a, b)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Pair]:
    with pair_of(tmp_path_factory.mktemp("pair"), postgres) as pair:
        yield pair


@pytest.fixture
def pair(started: Pair, request: pytest.FixtureRequest) -> Pair:
    request.node.stash[LOGS] = started.hands.logs
    started.settle()
    return started


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(ALL_REDUCE, marks=pytest.mark.sweep, id="AllReduce"),
        pytest.param(PARAMETER_SERVER, marks=pytest.mark.soak, id="Server"),
        pytest.param(FED_AVG, marks=pytest.mark.soak, id="FedAvg"),
    ],
)
def test_a_standby_ends_the_run_of_a_frozen_leader(
    pair: Pair, postgres: Postgres, strategy: Job
) -> None:
    with Client(pair.both) as client:
        expected = outcome_of(client.submit(paced(strategy, 0.0, STEPS)))
        run = client.submit(paced(strategy, 0.1, STEPS))
        watching = run.watch()
        next(item for item in watching if is_under_way(item, strategy))
        pair.leader.send(signal.SIGSTOP)
        frozen_s = time.monotonic()
        assert pair.standby.address == pair.of_standby
        print(f"took over after {time.monotonic() - frozen_s:.1f} s, ttl {LEASE_TTL_S} s")
        news = next(watching)  # of the next leader
        assert time.monotonic() - frozen_s < KEEPALIVE_S, "the frozen leader was not noticed"
        left = [news, *watching]
        assert any(isinstance(item, Event) and item.kind == "RunCompleted" for item in left)
        assert outcome_of(run).digests == expected.digests  # by the very same client
        assert formed(run) == 1, "a worker was given up"
    pair.leader.send(signal.SIGCONT)
    assert pair.leader.popen.wait(PATIENCE_S) == EXIT_FENCED
    terms = [term for (term,) in postgres.sql(TERMS, pair.journal)]
    assert terms == sorted(terms), "the old leader wrote again"


@pytest.mark.sweep
def test_clients_and_workers_find_the_next_leader_when_one_is_killed(pair: Pair) -> None:
    with Client(pair.of_standby) as lost, pytest.raises(StandbyError, match="leads"):
        lost.runs()
    with Client(pair.both) as client:
        expected = outcome_of(client.submit(paced(ALL_REDUCE, 0.0, STEPS)))
        run = client.submit(paced(ALL_REDUCE, 0.1, STEPS))
        await_step(run, 3)
        pair.leader.kill()
        assert outcome_of(run).digests == expected.digests  # by the very same client
        assert formed(run) == 1
        pair.settle()
        pair.leader.kill()
        assert client.runs()[0].run_id == run.run_id


@pytest.mark.sweep
def test_the_next_leader_goes_on_with_a_check(pair: Pair, gates: Gates) -> None:
    job = gated(LOCAL, gates.folder)
    gates.close("w1-batch-3")
    with Client(pair.both) as client:
        expected = outcome_of(client.submit(job))
        run = client.submit({**job, "verification": {"sample": 1.0}})
        gates.wait_reached("w1-batch-3")
        pair.leader.kill()
        assert pair.standby.address == pair.of_standby
        gates.open()
        assert outcome_of(run) == expected
        assert formed(run) == 2, "a worker was given up"
        verified = [e.payload for e in events_of(run) if e.kind == "SegmentVerified"]
    assert [(each["segment"], each["workers"]) for each in verified] == [
        (segment, ["w1"]) for segment in range(1, 7)
    ]


@pytest.mark.sweep
def test_tunnels_are_opened_to_the_next_leader(tmp_path: Path, postgres: Postgres) -> None:
    """It can dial none of the workers before they have found it."""
    with pair_of(tmp_path, postgres, "--tunnel") as pair, Client(pair.both) as client:
        pair.settle()
        expected = outcome_of(client.submit(paced(PARAMETER_SERVER, 0.0, STEPS)))
        run = client.submit(paced(PARAMETER_SERVER, 0.1, STEPS))
        await_step(run, 3)
        pair.leader.kill()
        assert outcome_of(run).digests == expected.digests
        assert {worker.address for worker in client.workers()} == {""}


@pytest.mark.sweep
def test_a_run_outlives_a_crash_of_the_database(pair: Pair, postgres: Postgres) -> None:
    with Client(pair.both) as client:
        expected = outcome_of(client.submit(paced(ALL_REDUCE, 0.0, STEPS)))
        run = client.submit(paced(ALL_REDUCE, 0.1, STEPS))
        await_event(run, "SegmentCommitted")
        postgres.stop()
        threading.Event().wait(1.0)  # longer than a segment, which wants to be committed
        postgres.start()
        assert outcome_of(run).digests == expected.digests
        assert formed(run) == 1
    assert not pair.leader.has_ended
    assert not pair.standby.has_ended


def is_under_way(item: Event | Progress, strategy: Job) -> bool:
    if isinstance(item, Event):
        return strategy is FED_AVG and item.kind == "ClientsAssigned"
    return strategy is not FED_AVG and item.step >= 3


def formed(run: RunHandle) -> int:
    """How often members were chosen."""
    return sum(each.kind == "MembersFormed" for each in events_of(run))

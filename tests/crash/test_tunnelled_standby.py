"""Workers behind tunnels find the next leader: it can dial none of them before they have."""

from collections.abc import Iterator

import pytest

from stratagem.client.sdk.blocking_client import Client
from tests.crash.hands import free_address, hands
from tests.crash.jobs import FED_AVG, PARAMETER_SERVER, Job, paced
from tests.crash.pair import Pair
from tests.crash.rig import await_step, outcome_of
from tests.postgres import Postgres

pytestmark = pytest.mark.sweep

STEPS = 24


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Pair]:
    journal = postgres.new_schema()
    flags = ("--lease-ttl-s", "4", "--worker-ttl-s", "15", "--journal", journal)
    with hands(tmp_path_factory.mktemp("pair"), *flags) as started:
        started.worker_flags_of = lambda _name: ("--tunnel",)
        a, b = free_address(), free_address()
        leader = started.coordinator("a", listen=a)
        workers = [started.worker(f"w{n}", f"{b},{a}") for n in range(2)]
        assert leader.address == a
        standby = started.coordinator("b", listen=b)
        assert all(worker.address for worker in workers)
        yield Pair(started, journal, leader, standby, a, b)


@pytest.mark.parametrize("strategy", [PARAMETER_SERVER, FED_AVG], ids=["Server", "FedAvg"])
def test_tunnels_are_opened_to_the_next_leader(pair: Pair, strategy: Job) -> None:
    pair.settle()
    with Client(pair.both) as client:
        expected = outcome_of(client.submit(paced(strategy, 0.0, STEPS)))
        run = client.submit(paced(strategy, 0.1, STEPS))
        await_step(run, 3)
        pair.leader.kill()
        assert outcome_of(run).digests == expected.digests
        assert {worker.address for worker in client.workers()} == {""}

"""A coordinator that loses everything but its journal when it is killed; the rest lies in S3."""

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.client.local_cluster import LocalCluster
from stratagem.client.sync import Client
from tests.crash.conftest import LOGS
from tests.crash.hands import hands
from tests.crash.jobs import FED_AVG, JOBS, job
from tests.crash.rig import ROOT, Rig, await_event, outcome_of, until
from tests.crash.test_sweep import OVER_AN_OBJECT_STORE
from tests.pipeline.s3_server import s3_server
from tests.postgres import Postgres

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(100)]

CASES = [
    # The first state, between two updates of the first round, and in the second round.
    *(("FedAvg", "coordinator.objects.after_put", passed) for passed in (0, 2, 7)),
    ("FedAvg", "coordinator.round.pulled", 1),
    ("FedAvg", "coordinator.round.folded", 1),
    ("FedYogi", "coordinator.objects.after_put", 5),
    ("FedAvg-large", "coordinator.objects.after_part", 5),
    ("Pipeline", "coordinator.commit.pulled", 1),
]


@pytest.fixture(name="endpoint", scope="module")
def _endpoint() -> Iterator[str]:
    with s3_server("stratagem") as endpoint:
        yield endpoint


def environ_of(endpoint: str, folder: str) -> dict[str, str]:
    return {
        "STRATAGEM_COORDINATOR_BLOB_STORE": f"s3://stratagem/{folder}",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    }


@pytest.fixture(name="s3_rig", scope="module")
def _s3_rig(endpoint: str) -> Iterator[Rig]:
    cluster = LocalCluster(
        workers=3,
        threads=1,
        failpoints=True,
        import_path=(ROOT,),
        environment={**environ_of(endpoint, "crash"), "PYTHONPATH": str(ROOT)},
        programs={
            "coordinator": [sys.executable, "-m", "tests.crash.forgetful"],
            "worker": [sys.executable, "-m", "stratagem.worker"],
        },
    )
    with cluster, cluster.client() as client:
        yield Rig(cluster, client)


@pytest.mark.parametrize(("name", "failpoint", "num_passed"), CASES)
def test_the_loss_of_a_coordinators_machine_changes_no_bits(
    s3_rig: Rig, request: pytest.FixtureRequest, name: str, failpoint: str, num_passed: int
) -> None:
    request.node.stash[LOGS] = s3_rig.logs
    s3_rig.settle()
    expected = s3_rig.undisturbed(name)
    s3_rig.settle()
    with s3_rig.armed("coordinator", failpoint, num_passed):
        assert s3_rig.outcome(JOBS[name]) == expected


def test_all_failpoints_of_object_stores_are_reached_here() -> None:
    assert {failpoint for _, failpoint, _ in CASES} >= OVER_AN_OBJECT_STORE


def test_a_standby_on_another_machine_folds_what_the_lost_one_has_accepted(
    endpoint: str,
    postgres: Postgres,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader is killed, and what it had on its disk is gone, when a round is half received."""
    for name, value in environ_of(endpoint, "standby").items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
    flags = ("--journal", postgres.new_schema(), "--worker-ttl-s", "5", "--lease-ttl-s", "2")
    spec = job(FED_AVG, model="build_paced", pace_s=0.05)
    with hands(tmp_path, *flags) as started, Client(listen) as client:
        request.node.stash[LOGS] = started.logs
        leader = started.coordinator("a", listen, data_dir="of-a")
        assert leader.address == listen
        started.coordinator("b", listen, data_dir="of-b")
        workers = [started.worker(f"w{n}", listen) for n in range(2)]
        assert all(worker.address for worker in workers)
        expected = outcome_of(client.submit(job(FED_AVG, model="build_paced", pace_s=0.0)))
        run = client.submit(spec)
        await_event(run, "UpdateReceived")
        leader.send(signal.SIGKILL)
        assert outcome_of(run).digests == expected.digests
        spool = tmp_path / "of-b" / "spool"
        until(lambda: not list(spool.rglob("*.safetensors")), "nothing is left behind")

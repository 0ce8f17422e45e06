"""A coordinator that loses everything but its journal when it is killed; the rest lies in S3."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.client.sdk.blocking import Client
from stratagem.common.tensors.files import file_digest
from tests.cluster.jobs import Gates
from tests.coordinator.store.troubled import FORBIDDEN, UNAVAILABLE, Troubled, troubled
from tests.crash.failpoint_table import OVER_AN_OBJECT_STORE
from tests.crash.failure_logs import LOGS
from tests.crash.hands import EXIT_FENCED, Process, free_address, hands
from tests.crash.jobs import FED_AVG, JOBS, LOCAL, PACED, crash_job, gated
from tests.crash.rig import Rig, await_event, cluster_with_failpoints, outcome_of, until
from tests.endurance.disks import mounted
from tests.patience import PATIENCE_S
from tests.postgres import Postgres
from tests.worker.pipeline.s3_server import s3_server

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.promise("What lies in an object store is enough to go on from anywhere."),
]

CASES = [
    # Between two updates of the first round.
    ("FedAvg", "coordinator.objects.after_put", 2),
    ("FedAvg-large", "coordinator.objects.after_part", 5),
    ("Pipeline", "coordinator.commit.pulled", 1),
]


@pytest.fixture(name="store", scope="module")
def _store() -> Iterator[Troubled]:
    with s3_server("stratagem") as endpoint, troubled(endpoint) as server:
        yield server


@pytest.fixture(name="endpoint", scope="module")
def _endpoint(store: Troubled) -> str:
    return store.endpoint


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
    cluster = cluster_with_failpoints(
        environment=environ_of(endpoint, "crash"),
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


@pytest.mark.parametrize("trouble", [UNAVAILABLE, FORBIDDEN])
def test_an_object_store_that_is_away_for_a_while_changes_no_bits(
    s3_rig: Rig, store: Troubled, gates: Gates, request: pytest.FixtureRequest, trouble: int
) -> None:
    """Answers that the library tries again, and ones that it does not."""
    request.node.stash[LOGS] = s3_rig.logs
    s3_rig.settle()
    document = gated(FED_AVG, gates.folder)
    expected = s3_rig.outcome(document)
    gates.close("client0-3")  # in the second round: what follows needs the store
    with s3_rig.running(document) as run:
        gates.wait_reached("client0-3")
        before, store.always = store.num_refused, trouble
        gates.open()
        try:
            until(lambda: store.num_refused > before + 5, "the store was asked")
            assert not run.status().phase.is_final
        finally:
            store.always = None
        assert outcome_of(run) == expected


def test_all_failpoints_of_object_stores_are_reached_here() -> None:
    assert {failpoint for _, failpoint, _ in CASES} >= OVER_AN_OBJECT_STORE


def test_standbys_on_other_machines_go_on_with_what_lies_in_the_bucket(
    endpoint: str,
    postgres: Postgres,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first leader freezes when a round is half received, and wakes when it has been replaced;
    the second one is killed. Each has a data directory of its own."""
    for name, value in environ_of(endpoint, "standby").items():
        monkeypatch.setenv(name, value)
    names = ("a", "b", "c")
    addresses = {name: free_address() for name in names}
    flags = ("--journal", postgres.new_schema(), "--worker-ttl-s", "5", "--lease-ttl-s", "2")
    with hands(tmp_path, *flags) as started, Client(",".join(addresses.values())) as client:
        request.node.stash[LOGS] = started.logs

        def coordinator(name: str) -> Process:
            return started.coordinator(name, addresses[name], data_dir=f"of-{name}")

        first = coordinator("a")
        assert first.address == addresses["a"]
        second = coordinator("b")
        workers = [started.worker(f"w{n}", ",".join(addresses.values())) for n in range(2)]
        assert all(worker.address for worker in workers)
        expected = outcome_of(client.submit(crash_job(FED_AVG, model=PACED, pace_s=0.0)))
        run = client.submit(crash_job(FED_AVG, model=PACED, pace_s=0.05))
        await_event(run, "UpdateReceived")
        first.send(signal.SIGSTOP)
        assert second.address == addresses["b"]
        with Client(addresses["b"]) as other:
            assert outcome_of(other.get(run.run_id)).digests == expected.digests
        first.send(signal.SIGCONT)
        assert first.popen.wait(PATIENCE_S) == EXIT_FENCED
        third = coordinator("c")
        second.kill()
        assert third.address == addresses["c"]
        with Client(addresses["c"]) as other:
            state = other.get(run.run_id).download(tmp_path / "final.safetensors")
        last = max(expected.digests, key=lambda party_and_segment: party_and_segment[1])
        assert file_digest(state) == expected.digests[last]


def test_a_disk_that_copies_have_filled_stops_no_commit(
    endpoint: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirteen states of 8 MB go through a disk of 32 MB, on which copies may take any room."""
    for name, value in environ_of(endpoint, "small-disk").items():
        monkeypatch.setenv(name, value)
    disk = tmp_path / "data"
    disk.mkdir()
    large = crash_job(LOCAL, model="wide", every=1, width=100_000)
    with mounted(disk, "size=32m"), hands(tmp_path, "--blob-cache-bytes", str(2**40)) as started:
        request.node.stash[LOGS] = started.logs
        coordinator = started.coordinator("coordinator")
        worker = started.worker("w0", coordinator.address)
        assert worker.address
        with Client(coordinator.address) as client:
            run = client.submit(large)
            outcome = outcome_of(run)
            assert len(outcome.digests) == 13
            before = run.download(tmp_path / "first.safetensors", "6")  # of a copy that is gone
            assert file_digest(before) == outcome.digests["", 6]
        said = coordinator.log_file.read_text()
        assert "a local copy makes room on the disk" in said
        assert "the coordinator's disk is full" not in said
        assert not coordinator.has_ended
        coordinator.kill()

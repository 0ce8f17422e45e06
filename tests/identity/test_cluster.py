"""A whole cluster with certificates: the same bits, strangers stay out, certificates run out, and
their authority is replaced or is over. Nobody who is in is restarted, and what is wrong is said
where somebody looks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.course.views import Phase
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import StratagemError, UnauthenticatedError
from stratagem.common.identity.certificates import (
    Authority,
    issue,
    make_authority,
    renew_authority,
    retire_authority,
    show,
)
from stratagem.common.identity.tls import Role, TlsFiles
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    federated,
    gates_in,
    model_parallel,
    outcome_of,
    train,
    wait_for,
)
from tests.crash.rig import until
from tests.identity.rig import WORKERS, authority_of_cluster, cluster_of, expire, flags
from tests.jobs import job, user_data
from tests.reference.loops import federated_loop, sharded_loop

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.promise("Behind TLS runs go on with their bits while certificates come and go."),
]

HOSTS = ("127.0.0.1",)
EXPIRED = "no new connection can be made"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority_of_cluster(tmp_path_factory.mktemp("authority") / "certs")


@pytest.fixture(scope="module")
def cluster(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    with cluster_of(authority, tmp_path_factory.mktemp("tls")) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster, authority: Authority) -> Iterator[Client]:
    with Client(cluster.address, tls=authority.files("client-alice")) as client:
        yield client


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    with gates_in(tmp_path) as gates:
        yield gates


EXCHANGES: dict[str, dict[str, Any]] = {
    "AllReduce": data_parallel(2),
    "ParameterServer": data_parallel(2, "ParameterServer"),
    "Direct": model_parallel({"0 1": "worker-0", "2": "worker-1"}),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_tls_changes_no_bits(client: Client, exchange: str) -> None:
    spec = job(strategy=EXCHANGES[exchange])
    outcome = train(client, spec)
    replicas = 1 if exchange == "Direct" else 2
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, replicas).state)
    assert outcome.status.submitted_by == "client alice"
    assert {each.data_plane for each in client.workers()} == {"tls"}
    if exchange == "AllReduce":  # on one host, where shared memory is faster
        assert outcome.status.engine == "grpc"


def test_federated_rounds_under_tls(client: Client) -> None:
    spec = federated(rounds=2, partition={"method": "contiguous"})
    outcome = train(client, spec)
    everybody = list(range(4))
    assert_same_bits(outcome.state, federated_loop(spec, ALLOWED, lambda _: everybody).state)


def test_strangers_stay_out(cluster: LocalCluster, authority: Authority, tmp_path: Path) -> None:
    stranger = make_authority(tmp_path / "stranger")
    theirs = stranger.issue(Role.WORKER, "worker-2")
    mixed = TlsFiles(authority.folder / "ca.crt", theirs.cert, theirs.key)
    command = [sys.executable, "-m", "stratagem.worker", "--coordinator", cluster.address]
    command += ["--name", "worker-2", *flags(mixed)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        line = next(line for line in process.stderr if "cannot register" in line)
        process.kill()
        process.stderr.read()
    process.wait()
    assert f"{cluster.address} does not accept the certificate {theirs.cert}" in line
    for files in (None, stranger.issue(Role.CLIENT, "alice")):
        with pytest.raises(UnauthenticatedError), Client(cluster.address, tls=files) as client:
            client.workers()
    with Client(cluster.address, tls=authority.files("client-alice")) as client:
        assert [each.worker_id for each in client.workers()] == list(WORKERS)


def test_certificates_run_out_and_are_renewed_during_a_run(
    cluster: LocalCluster, client: Client, authority: Authority, tmp_path: Path, gates: Gates
) -> None:
    starts = {name: process.num_starts for name, process in cluster.processes.items()}
    gates.close("batch-4")
    spec = job(data=user_data("gated", folder=str(tmp_path)), strategy=data_parallel(2))
    run = client.submit(spec)
    gates.wait_reached("batch-4")
    past = timedelta(seconds=-1)
    authority.issue(Role.COORDINATOR, "coordinator", HOSTS, past, renew=True)
    for name in WORKERS:
        authority.issue(Role.WORKER, name, (), past, renew=True)
    # A worker that is started anew is not let in, and says why. Those that are in go on.
    cluster.kill("worker-1")
    gates.open()
    until(lambda: "has expired at" in cluster.log_tail("worker-1"), "worker-1 says why")
    heard = {each.worker_id: each for each in client.workers()}
    assert heard["worker-0"].is_alive
    authority.issue(Role.COORDINATOR, "coordinator", HOSTS, renew=True)
    for name in WORKERS:
        authority.issue(Role.WORKER, name, renew=True)
    outcome = outcome_of(run)
    assert outcome.status.phase is Phase.COMPLETED
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2).state)
    until(lambda: all(each.is_alive for each in client.workers()), "worker-1 is back")
    now = {name: process.num_starts for name, process in cluster.processes.items()}
    assert now == {**starts, "worker-1": now["worker-1"]}
    # Everybody can be met anew.
    again = job(strategy=data_parallel(2))
    assert_same_bits(train(client, again).state, sharded_loop(again, ALLOWED, 2).state)
    assert wait_for(client.submit(again), "MembersFormed")


def test_the_doctor_asks_with_a_workers_certificate(
    cluster: LocalCluster, authority: Authority
) -> None:
    command = [sys.executable, "-m", "stratagem.program"]
    command += ["doctor", "--format", "json", "--worker-settings"]
    worker = ["--coordinator", cluster.address, "--name", "worker-0", "--threads", "1"]
    worker += flags(authority.files("worker-worker-0"))
    told = subprocess.run([*command, *worker], capture_output=True, text=True, check=False)
    found = {each["check"]: each for each in json.loads(told.stdout)}
    assert told.returncode == 0, told.stderr
    assert found["connection"]["level"] == found["clock"]["level"] == "ok"
    assert found["certificate"]["found"].startswith("worker worker-0, expires in")
    assert found["exchange"]["found"] == "data plane tls, mesh grpc"


def incarnations(cluster: LocalCluster, authority: Authority) -> dict[str, str]:
    """Of the workers that are in, as somebody sees it who connects anew."""
    try:
        with Client(cluster.address, tls=authority.files("client-alice")) as client:
            return {each.worker_id: each.incarnation for each in client.workers() if each.is_alive}
    except StratagemError:
        return {}


def refusal(cluster: LocalCluster, authority: Authority) -> str:
    """Return the text of the error with which a new connection ends; empty where it succeeds."""
    try:
        with Client(cluster.address, tls=authority.files("client-alice")) as client:
            client.workers()
    except StratagemError as error:
        return str(error)
    return ""


def come_back(cluster: LocalCluster, authority: Authority, name: str) -> None:
    """A worker dies, and connects with what lies there now."""
    before = incarnations(cluster, authority)[name]
    cluster.kill(name)
    come_back_by_itself(cluster, authority, name, before)


def come_back_by_itself(
    cluster: LocalCluster, authority: Authority, name: str, before: str
) -> None:
    until(
        lambda: incarnations(cluster, authority).get(name, before) != before,
        f"{name} is let in again",
    )


def test_an_authority_is_replaced_while_a_run_goes_on(
    cluster: LocalCluster, client: Client, authority: Authority, tmp_path: Path, gates: Gates
) -> None:
    folder = authority.folder
    num_starts = cluster.processes["coordinator"].num_starts
    log = cluster.folder / "logs" / "coordinator.log"
    num_before = log.read_text().count(EXPIRED)
    gates.close("batch-4")
    spec = job(data=user_data("gated", folder=str(tmp_path)), strategy=data_parallel(2))
    run = client.submit(spec)
    gates.wait_reached("batch-4")
    renew_authority(folder)
    # The worker's certificate is of the new authority, the coordinator's of the old one.
    issue(folder, workers=["worker-0"], clients=[], renew=True)
    come_back(cluster, authority, "worker-0")
    issue(folder, workers=[], clients=[], renew=True)
    retire_authority(folder)
    come_back(cluster, authority, "worker-1")
    gates.open()
    assert_same_bits(outcome_of(run).state, sharded_loop(spec, ALLOWED, 2).state)
    again = job(strategy=data_parallel(2))
    assert_same_bits(train(client, again).state, sharded_loop(again, ALLOWED, 2).state)
    assert cluster.processes["coordinator"].num_starts == num_starts
    assert log.read_text().count(EXPIRED) == num_before


def test_an_authority_that_is_over_is_named_by_everybody_and_replaced_without_a_restart(
    cluster: LocalCluster, authority: Authority
) -> None:
    folder = authority.folder
    before = incarnations(cluster, authority)
    assert set(before) == set(WORKERS)
    expire(authority)
    when = f"{show(folder / 'ca.crt')[0].expires:%Y-%m-%d %H:%M} UTC"
    over = f"in {folder / 'ca.crt'}, which has signed the certificate"
    for process in ("worker-0", "coordinator"):
        cluster.kill(process)
        until(
            lambda process=process: over in cluster.log_tail(process),  # type: ignore[misc]
            f"{process} says what is over",
        )
        assert when in cluster.log_tail(process)
    # A coordinator that is still starting refuses the connection without a word about authorities.
    until(lambda: over in refusal(cluster, authority), "a client is told what is over")
    assert when in refusal(cluster, authority)
    starts = {name: process.num_starts for name, process in cluster.processes.items()}
    renew_authority(folder)
    issue(folder, workers=[], clients=[], renew=True)
    retire_authority(folder)
    come_back_by_itself(cluster, authority, "worker-0", before["worker-0"])
    assert {n: process.num_starts for n, process in cluster.processes.items()} == starts

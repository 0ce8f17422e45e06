"""Real processes whose authority is replaced, or is over: runs go on, nobody is restarted, and what
is wrong is said where somebody looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.views import Phase
from stratagem.common.base.errors import StratagemError
from stratagem.common.identity.certificates import (
    Authority,
    issue,
    renew_authority,
    retire_authority,
    show,
)
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    gates_in,
    outcome_of,
    train,
)
from tests.crash.rig import until
from tests.identity.rig import WORKERS, authority_of_cluster, cluster_of, expire
from tests.jobs import job, user_data
from tests.reference.loops import sharded_loop

pytestmark = pytest.mark.cluster


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return authority_of_cluster(tmp_path / "certs")


@pytest.fixture
def cluster(authority: Authority, tmp_path: Path) -> Iterator[LocalCluster]:
    with cluster_of(authority, tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    with gates_in(tmp_path) as gates:
        yield gates


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
    cluster: LocalCluster, authority: Authority, tmp_path: Path, gates: Gates
) -> None:
    folder = authority.folder
    gates.close("batch-4")
    spec = job(data=user_data("gated", folder=str(tmp_path)), strategy=data_parallel(2))
    with Client(cluster.address, tls=authority.files("client-alice")) as client:
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
        outcome = outcome_of(run)
        assert outcome.status.phase is Phase.COMPLETED
        assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2).state)
        again = job(strategy=data_parallel(2))
        assert_same_bits(train(client, again).state, sharded_loop(again, ALLOWED, 2).state)
    assert cluster.processes["coordinator"].num_starts == 1
    assert "no new connection can be made" not in cluster.log_tail("coordinator")


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

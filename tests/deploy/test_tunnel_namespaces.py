"""Sites that the coordinator cannot reach at all: network namespaces with a proxy between them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from stratagem.client.local.cluster import LocalCluster
from tests import connect_proxy
from tests.cluster.jobs import ALLOWED, assert_same_bits, data_parallel, train
from tests.jobs import ALLOW, job
from tests.patience import PATIENCE_S
from tests.reference.loops import sharded_loop
from tests.repository import ROOT

SITES, BETWEEN = "stratagem-sites", "stratagem-between"
HERE, PROXY_HERE, PROXY_THERE, SITE = "10.203.1.1", "10.203.1.2", "10.203.2.1", "10.203.2.2"
SITES_NETWORK = "10.203.2.0/30"

# Processes that start by themselves in their namespaces; cluster/test_tunnel.py has the quick ones.
pytestmark = [pytest.mark.sweep, pytest.mark.cluster, pytest.mark.timeout(2 * PATIENCE_S)]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def separated() -> Iterator[None]:
    """This machine, a place between, and the sites; only neighbours reach each other."""
    try:
        for name in (SITES, BETWEEN):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "st-here", "type", "veth", "peer", "name", "st-b1", "netns", BETWEEN)
        ip("-n", SITES, "link", "add", "st-s", "type", "veth", "peer", "name", "st-b2")
        ip("-n", SITES, "link", "set", "st-b2", "netns", BETWEEN)
        ip("addr", "add", f"{HERE}/30", "dev", "st-here")
        ip("link", "set", "st-here", "up")
        ip("route", "add", "unreachable", SITES_NETWORK)
        for name, end, place in (
            (BETWEEN, "st-b1", PROXY_HERE),
            (BETWEEN, "st-b2", PROXY_THERE),
            (SITES, "st-s", SITE),
        ):
            ip("-n", name, "addr", "add", f"{place}/30", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        yield
    finally:
        subprocess.run(["ip", "route", "del", SITES_NETWORK], check=False, capture_output=True)
        for name in (SITES, BETWEEN):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def places() -> Iterator[None]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        with separated():
            yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")


def within(name: str) -> list[str]:
    return [shutil.which("ip") or "ip", "netns", "exec", name]


def why_unreachable(place: str, *, within: Sequence[str] = ()) -> str:
    """What the kernel says of a connection to that place."""
    code = f"import socket; socket.create_connection(({place!r}, 1), 1.0)"
    tried = subprocess.run(
        [*within, sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    return tried.stderr


def test_sites_that_cannot_be_reached_train(places: None, tmp_path: Path) -> None:
    """Sites reach a proxy, the proxy reaches the coordinator, and nobody reaches the sites."""
    assert "Network is unreachable" in why_unreachable(HERE, within=within(SITES))
    assert "No route to host" in why_unreachable(SITE)
    insecure = {
        "STRATAGEM_COORDINATOR_ALLOW_INSECURE_NETWORK": "true",
        "STRATAGEM_WORKER_ALLOW_INSECURE_NETWORK": "true",
        "no_proxy": "",
        "no_grpc_proxy": "",
    }
    with connect_proxy.running("--host", "0.0.0.0", within=within(BETWEEN)) as proxy:
        port = proxy.address.rpartition(":")[2]
        through = ["--tunnel", "--proxy", f"http://{PROXY_THERE}:{port}"]
        with (
            LocalCluster(
                workers=2,
                threads=1,
                listen=f"{HERE}:0",
                data_dir=tmp_path,
                import_path=[ROOT],
                allow=[ALLOW],
                programs={
                    "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
                    "worker": [*within(SITES), sys.executable, "-m", "stratagem.worker"],
                },
                environment=insecure,
                worker_arguments={f"worker-{number}": through for number in range(2)},
            ) as cluster,
            cluster.client() as client,
        ):
            spec = job(strategy=data_parallel(2, "ParameterServer"))
            outcome = train(client, spec)
            assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2).state)
            address = cluster.address
    assert proxy.said is not None
    assert set(proxy.said) == {f"200 {address}"}

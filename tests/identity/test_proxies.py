"""Connections through an HTTP proxy, which is a process of its own here."""

from pathlib import Path

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.common.identity.certificates import Authority
from stratagem.common.rpc.channel import Proof, open_channel
from stratagem.common.rpc.http_proxy import check_proxy, proxy_for
from stratagem.common.rpc.tls_probe import explain
from tests import connect_proxy
from tests.cluster.jobs import ALLOWED, assert_same_bits, data_parallel, train
from tests.identity.rig import WORKERS, asked, authority_of_cluster, flags, serving
from tests.jobs import ALLOW, job
from tests.reference.loops import sharded_loop
from tests.repository import ROOT

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


async def test_certificates_are_shown_through_a_proxy_that_wants_a_password(
    authority: Authority,
) -> None:
    with connect_proxy.running("--credentials", "anna:secret") as proxy:
        url = f"http://anna:secret@{proxy.address}"
        async with serving(authority.files("coordinator")) as ports:
            proof = Proof(authority.files("client-alice"))
            async with open_channel(ports.certificates, proof, proxy=url) as channel:
                assert await asked(channel) == "client alice"
    assert proxy.said == [f"200 {ports.certificates}"]


async def test_a_proxy_that_refuses_is_named_without_the_password(authority: Authority) -> None:
    with connect_proxy.running("--credentials", "anna:secret") as proxy:
        url = f"http://anna:wrong@{proxy.address}"
        proof = Proof(authority.files("worker-w0"))
        why = explain("127.0.0.1:1", proof, proxy=url)
    assert why == (
        f"the proxy {proxy.address} answers 'HTTP/1.1 407 Proxy Authentication Required' for "
        "127.0.0.1:1"
    )


def test_the_issuer_of_a_proxy_that_opens_tls_is_named(
    authority: Authority, stranger: Authority
) -> None:
    theirs = stranger.files("coordinator")
    with connect_proxy.running("--opens-tls", str(theirs.cert), str(theirs.key)) as proxy:
        # What stands behind it is of no importance: the proxy answers in its place.
        why = explain(
            proxy.address, Proof(authority.files("worker-w0")), proxy=f"http://{proxy.address}"
        )
    assert f"not signed by an authority in {authority.files('coordinator').ca}, but by" in why
    assert f"the proxy {proxy.address} seems to open TLS" in why


def test_which_proxy_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_for("host:1") is None
    monkeypatch.setenv("https_proxy", "http://u:p%40s@there:3128")
    found = proxy_for("host:1")
    assert found is not None
    assert (str(found), found.credentials) == ("there:3128", "u:p@s")
    assert str(proxy_for("host:1", "http://mine:8080")) == "mine:8080"
    assert "p@s" not in repr(found)
    monkeypatch.setenv("no_proxy", ".example.org, 10.0.0.0/8,localhost")
    for direct in ("a.example.org:1", "10.3.2.1:1", "localhost:7070"):
        assert proxy_for(direct) is None
    for through in ("example.com:1", "11.0.0.1:1"):
        assert proxy_for(through) is not None
    monkeypatch.setenv("https_proxy", "socks5://there:1")
    assert proxy_for("example.com:1") is None, "gRPC takes no notice of it either"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("there:3128", "is not http://"),
        ("https://there:3128", "is not http://"),
        ("http://u:secret@there/path", "'there/path' is not http://"),
        ("http://there", "there has no port"),
        ("http://there:99999", "Port out of range"),
    ],
)
def test_urls_that_are_no_proxy(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        check_proxy(url)
    assert "secret" not in str(caught.value)


@pytest.mark.cluster
def test_a_tunnelled_worker_proves_itself_through_a_proxy_from_end_to_end(tmp_path: Path) -> None:
    """The coordinator dials through the tunnel and expects the worker's own certificate there."""
    authority = authority_of_cluster(tmp_path / "certs")
    coordinator = authority.files("coordinator")
    with connect_proxy.running("--credentials", "anna:secret") as proxy:
        through = ["--tunnel", "--proxy", f"http://anna:secret@{proxy.address}"]
        cluster = LocalCluster(
            workers=len(WORKERS),
            threads=1,
            data_dir=tmp_path / "data",
            import_path=[ROOT],
            allow=[ALLOW],
            environment={
                "STRATAGEM_COORDINATOR_TLS_CA": str(coordinator.ca),
                "STRATAGEM_COORDINATOR_TLS_CERT": str(coordinator.cert),
                "STRATAGEM_COORDINATOR_TLS_KEY": str(coordinator.key),
            },
            worker_arguments={
                name: [*flags(authority.files(f"worker-{name}")), *through] for name in WORKERS
            },
        )
        alice = authority.files("client-alice")
        with cluster, Client(cluster.address, tls=alice) as me:
            assert {(each.address, each.data_plane) for each in me.workers()} == {("", "tls")}
            spec = job(strategy=data_parallel(2, "ParameterServer"))
            outcome = train(me, spec)
            assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2).state)
            address = cluster.address
    assert proxy.said is not None
    assert set(proxy.said) == {f"200 {address}"}

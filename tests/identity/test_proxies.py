"""Connections through an HTTP proxy, which is a process of its own here."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from stratagem.client.cli.main import app
from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.common.diagnostics.findings import Level
from stratagem.common.identity.certificates import Authority
from stratagem.common.rpc.channel import Proof, open_channel
from stratagem.common.rpc.http_proxy import check_proxy, proxy_for
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.common.rpc.tls_probe import explain
from stratagem.tools.doctor.__main__ import examine
from stratagem.worker.process.worker_settings import from_command_line
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


def test_signed_requests_go_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = tmp_path / "object"
    content.write_bytes(b"state")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with (
        connect_proxy.running() as proxy,
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            monkeypatch.setenv("https_proxy", f"http://{proxy.address}")
            address = f"127.0.0.1:{server.server_port}"
            got = SignedObjects(allows_http=True).get(f"http://{address}/object?x", 5)
        finally:
            server.shutdown()
            thread.join()
    assert bytes(got) == b"state"
    assert proxy.said == [f"200 {address}"]


async def test_a_proxy_that_refuses_is_named_without_the_password(authority: Authority) -> None:
    with connect_proxy.running("--credentials", "anna:secret") as proxy:
        url = f"http://anna:wrong@{proxy.address}"
        proof = Proof(authority.files("worker-w0"))
        why = explain("127.0.0.1:1", proof, proxy=url)
    assert why == (
        f"the proxy {proxy.address} does not accept this USER:PASSWORD "
        "('HTTP/1.1 407 Proxy Authentication Required')"
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


BEHIND = "127.0.0.1:1"
"""Where a coordinator would be; nobody is there."""
SAID = {
    "password": "the proxy {proxy} does not accept this USER:PASSWORD "
    "('HTTP/1.1 407 Proxy Authentication Required')",
    "port": "the proxy {proxy} refuses to connect to 127.0.0.1:1 ('HTTP/1.1 403 Forbidden'): have "
    "it allow CONNECT to port 1",
    "away": "the proxy {proxy} cannot be reached: Connection refused",
    "coordinator": "the proxy {proxy} does not reach 127.0.0.1:1 ('HTTP/1.1 502 Bad Gateway')",
    "opened": "the certificate of 127.0.0.1:1 is not signed by an authority in {ca}, but by "
    "'{issuer}' (unable to get local issuer certificate): the proxy {proxy} seems to open TLS, and "
    "then neither side knows who the other is; have it let 127.0.0.1:1 through",
}
"""What is said of a proxy by what is wrong with it."""


@contextmanager
def ill_proxy(case: str, stranger: Authority, own_port: int) -> Iterator[str]:
    """The URL of a proxy with which something is wrong. own_port: of a server that it lies before
    where it opens TLS: it connects before it does."""
    theirs = stranger.files("coordinator")
    arguments = {
        "password": ["--credentials", "anna:secret"],
        "port": ["--only-port", "7070"],
        "away": [],
        "coordinator": [],
        "opened": ["--opens-tls", str(theirs.cert), str(theirs.key), "--goes-to", str(own_port)],
    }[case]
    with connect_proxy.running(*arguments) as proxy:
        if case != "away":
            yield f"http://anna:wrong@{proxy.address}"
    if case == "away":
        yield f"http://anna:wrong@{proxy.address}"


def sentence(case: str, url: str, authority: Authority, stranger: Authority) -> str:
    (issued,) = x509.load_pem_x509_certificates(
        Path(str(stranger.files("coordinator").cert)).read_bytes()
    )
    return SAID[case].format(
        proxy=url.rpartition("@")[2],
        ca=authority.files("coordinator").ca,
        issuer=issued.issuer.rfc4514_string(),
    )


@pytest.mark.parametrize("case", SAID)
def test_the_doctor_names_what_is_wrong_with_a_proxy(
    case: str, authority: Authority, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cluster, where the proxy is one of the environment, and of a worker with a tunnel."""
    with listening() as own_port, ill_proxy(case, stranger, own_port) as url:
        told = sentence(case, url, authority, stranger)
        worker = ["--coordinator", BEHIND, "--name", "w0", "--tunnel", "--proxy", url]
        given = from_command_line([*worker, *flags(authority.files("worker-w0"))])
        (found,) = (each for each in asyncio.run(examine(given)) if each.level is Level.FAIL)
        assert (found.check, found.found) == ("connection", told)
        assert found.advice.startswith("ask those who run the proxy")
        monkeypatch.setenv("https_proxy", url)
        command = ["doctor", "--coordinator", BEHIND, "--format", "json"]
        command += flags(authority.files("client-alice"))
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    (failed,) = [each for each in json.loads(done.stdout) if each["level"] == "fail"]
    assert (failed["check"], failed["found"]) == ("connection", told)
    assert "wrong" not in done.output


@pytest.mark.sweep
def test_the_doctor_of_a_worker_behind_a_proxy_that_opens_tls_is_a_process(
    authority: Authority, stranger: Authority
) -> None:
    command = [sys.executable, "-m", "stratagem.program", "doctor", "--format", "json"]
    worker = ["--coordinator", BEHIND, "--name", "w0", "--threads", "1", "--tunnel"]
    worker += flags(authority.files("worker-w0"))
    with listening() as own_port, ill_proxy("opened", stranger, own_port) as url:
        told = subprocess.run(
            [*command, "--worker-settings", *worker, "--proxy", url],
            capture_output=True,
            text=True,
            check=False,
        )
        expected = sentence("opened", url, authority, stranger)
    assert told.returncode == 1, told.stderr
    failed = [each["found"] for each in json.loads(told.stdout) if each["level"] == "fail"]
    assert failed == [expected]


@contextmanager
def listening() -> Iterator[int]:
    """The port of a socket that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_what_is_waited_for_once_a_coordinator_has_answered(
    authority: Authority, stranger: Authority
) -> None:
    """A proxy that is away for a moment, as when it is restarted; not one that refuses."""
    proof = Proof(authority.files("client-alice"))
    lasting = {}
    for case in ("password", "port", "away", "coordinator"):
        with ill_proxy(case, stranger, 0) as url:
            lasting[case] = bool(explain(BEHIND, proof, proxy=url, lasting=True))
    assert lasting == {"password": True, "port": True, "away": False, "coordinator": False}


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

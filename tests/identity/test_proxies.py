"""Connections through an HTTP proxy, which is a process of its own here."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from stratagem.client.cli.main import assemble
from stratagem.client.sdk.blocking import Client
from stratagem.common.identity.certificates import Authority
from stratagem.common.observe.findings import Level
from stratagem.common.rpc.channel import Proof, open_channel
from stratagem.common.rpc.probe import check_proxy, explain, proxy_for
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.tools.doctor import examine
from stratagem.worker.process.settings import from_command_line
from tests import connect_proxy
from tests.cluster.jobs import ALLOWED, assert_same_bits, data_parallel, train
from tests.identity.rig import WORKERS, asked, authority_of_cluster, cluster_of, flags, serving
from tests.jobs import job
from tests.reference.loops import sharded_loop

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
    """Of a cluster, where the proxy is one of the environment, and of a worker with a tunnel. Who
    was there before waits for a proxy that is away, as when it is restarted, not for one that
    refuses."""
    with listening() as own_port, ill_proxy(case, stranger, own_port) as url:
        told = sentence(case, url, authority, stranger)
        worker = ["--coordinator", BEHIND, "--name", "w0", "--tunnel", "--proxy", url]
        given = from_command_line([*worker, *flags(authority.files("worker-w0"))])
        (found,) = (each for each in asyncio.run(examine(given)) if each.level is Level.FAIL)
        assert (found.check, found.found) == ("connection", told)
        assert found.advice.startswith("ask those who run the proxy")
        alice = Proof(authority.files("client-alice"))
        lasting = explain(BEHIND, alice, proxy=url, lasting=True)
        assert bool(lasting) is (case not in ("away", "coordinator"))
        monkeypatch.setenv("https_proxy", url)
        command = ["doctor", "--coordinator", BEHIND, "--format", "json"]
        command += flags(authority.files("client-alice"))
        done = CliRunner().invoke(assemble(), command)
    assert done.exit_code == 1
    (failed,) = [each for each in json.loads(done.stdout) if each["level"] == "fail"]
    assert (failed["check"], failed["found"]) == ("connection", told)
    assert "wrong" not in done.output


@contextmanager
def listening() -> Iterator[int]:
    """The port of a socket that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


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


@pytest.mark.sweep
@pytest.mark.promise("Certificates and tokens of a proxy are enough for a whole run over tunnels.")
def test_a_tunnelled_worker_proves_itself_through_a_proxy_from_end_to_end(tmp_path: Path) -> None:
    """The coordinator dials through the tunnel and expects the worker's own certificate there."""
    authority = authority_of_cluster(tmp_path / "certs")
    with connect_proxy.running("--credentials", "anna:secret") as proxy:
        through = ["--tunnel", "--proxy", f"http://anna:secret@{proxy.address}"]
        cluster = replace(
            cluster_of(authority, tmp_path / "data"),
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

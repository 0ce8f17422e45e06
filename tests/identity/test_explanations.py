"""Failures of identity come with a sentence that names the file and the remedy."""

import asyncio
import gc
import select
import socket
import struct
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest

from stratagem.client.sdk.client import AsyncClient
from stratagem.common.base.errors import UnauthenticatedError, UnavailableError
from stratagem.common.identity.certificates import Authority
from stratagem.common.identity.tls import Role, TlsFiles
from stratagem.common.rpc import channel as channels
from stratagem.common.rpc.channel import Proof
from stratagem.common.rpc.probe import explain
from stratagem.common.rpc.server import bind, make_server
from tests.free_ports import free_port
from tests.identity.rig import serving
from tests.patience import AT_ONCE_S, PATIENCE_S


@pytest.fixture(autouse=True)
def _nobody_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that waiting for one would be seen."""
    monkeypatch.setattr("stratagem.client.sdk.connection.STARTING_S", 2 * AT_ONCE_S)


async def problem(address: str, proof: Proof) -> str:
    """What a client is told, at once."""
    began_s = time.monotonic()
    with pytest.raises(UnauthenticatedError) as caught:
        async with AsyncClient(
            address, tls=proof.tls, token_file=proof.token_file, patience_s=2 * AT_ONCE_S
        ) as client:
            await client.runs()
    assert time.monotonic() - began_s < AT_ONCE_S
    return str(caught.value)


async def test_a_certificate_that_is_missing_or_of_another_authority(
    authority: Authority, stranger: Authority, own_authority: Authority
) -> None:
    ca = authority.folder / "ca.crt"
    theirs = stranger.files("client-alice")
    expired = own_authority.issue(Role.CLIENT, "alice", (), timedelta(seconds=-1), renew=True)
    async with serving(authority.files("coordinator")) as ports:
        at = ports.certificates
        assert await problem(at, Proof(TlsFiles(ca))) == (
            f"{at} asks for a certificate: give --tls-cert and --tls-key, or call its "
            f"--token-listen address with --token-file"
        )
        said = await problem(at, Proof(TlsFiles(ca, theirs.cert, theirs.key)))
        assert said.startswith(
            f"{at} does not accept the certificate {theirs.cert}, signed by 'CN="
        )
        said = await problem(at, Proof(theirs))
        assert said.startswith(f"the certificate of {at} is not signed by an authority in ")
        assert f"{theirs.ca}, but by 'CN=stratagem development authority'" in said
        said = await problem(at, Proof(TlsFiles(ca, expired.cert, expired.key)))
        assert said.startswith(f"the certificate {expired.cert} has expired at 2")
        for plain in (at, ports.tokens):
            assert (await problem(plain, Proof())).startswith(f"{plain} wants TLS: give --tls-ca")


def test_a_server_that_goes_before_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def connected_and_reset(address: tuple[str, int], timeout_s: float) -> socket.socket:
            ours = socket.socket()
            ours.connect(address)
            theirs, _ = server.accept()
            # Closing without lingering sends a reset, which has arrived when the poll returns.
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()
            poll = select.poll()
            poll.register(ours, select.POLLHUP)
            assert poll.poll(PATIENCE_S * 1000)
            ours.settimeout(timeout_s)
            return ours

        monkeypatch.setattr(socket, "create_connection", connected_and_reset)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert explain(f"127.0.0.1:{port}", Proof()) == ""
            gc.collect()
    assert not caught, "a socket was left open"


async def test_a_server_that_is_not_what_it_should_be(own_authority: Authority) -> None:
    alice = Proof(own_authority.files("client-alice"))
    own_authority.issue(Role.COORDINATOR, "coordinator", ["head", "10.0.0.7"], renew=True)
    files = own_authority.files("coordinator")
    async with serving(files) as ports:
        at = ports.certificates
        said = await problem(at, alice)
        assert said == f"the certificate of {at} is for head, 10.0.0.7, and not for 127.0.0.1"
        said = await asyncio.to_thread(explain, at, alice, "w1")
        assert said.endswith("and not for w1.worker.stratagem")
        expired = timedelta(seconds=-1)
        own_authority.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"], expired, renew=True)
        said = await problem(at, alice)
        assert said.startswith(f"the certificate of {at} has expired at 2")
        own_authority.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"], renew=True)
        assert await asyncio.to_thread(explain, at, alice) == ""
    async with serving(own_authority.files("client-alice")) as ports:
        said = await problem(ports.certificates, alice)
        assert said == f"the certificate of {ports.certificates} is not one of a server"


async def test_tls_to_a_plaintext_server(authority: Authority) -> None:
    server = make_server()
    at = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    said = await problem(at, Proof(authority.files("client-alice")))
    assert said == f"{at} speaks plaintext: it was started without certificates"
    assert await asyncio.to_thread(explain, at, Proof()) == ""
    await server.stop(None)


async def test_nobody_there_is_no_matter_of_identity(authority: Authority, tmp_path: Path) -> None:
    alice = authority.files("client-alice")
    assert await asyncio.to_thread(explain, "127.0.0.1:1", Proof(alice)) == ""
    assert await asyncio.to_thread(explain, "127.0.0.1:1", Proof()) == ""
    gone = Proof(TlsFiles(tmp_path / "gone", alice.cert, alice.key))
    assert "gone: No such file" in await asyncio.to_thread(explain, "127.0.0.1:1", gone)
    async with AsyncClient("127.0.0.1:1", tls=alice) as client:
        with pytest.raises(UnavailableError, match="no coordinator answers"):
            await client.runs()


async def test_a_client_waits_for_a_restart_but_not_for_a_certificate(
    own_authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_LOOK_EVERY_S", 0.0)
    files = own_authority.files("coordinator")
    port = free_port()  # of those that nobody else takes while it serves nobody
    async with serving(files, port=port) as ports:
        at = ports.certificates
        client = AsyncClient(at, tls=own_authority.files("client-alice"))
        await client.__aenter__()
        assert (await client.runs())[0].name == "client alice"
    waiting = asyncio.create_task(client.runs())
    async with serving(files, port=port):
        assert (await waiting)[0].name == "client alice"
    own_authority.issue(Role.CLIENT, "alice", (), timedelta(seconds=-1), renew=True)
    waiting = asyncio.create_task(client.runs())
    async with serving(files, port=port):
        with pytest.raises(UnauthenticatedError, match="has expired"):
            await asyncio.wait_for(waiting, PATIENCE_S)
    await client.close()

"""Real connections: who gets in with which certificate or token, and files that change."""

import asyncio
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from stratagem.common.base.errors import InvalidInputError, UnauthenticatedError
from stratagem.common.identity.callers import Scope, add_token, new_token
from stratagem.common.identity.certificates import Authority
from stratagem.common.identity.tls import Role, TlsFiles
from stratagem.common.rpc import channel as channels
from stratagem.common.rpc.channel import Proof, open_channel
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.v1 import worker_pb2
from stratagem.v1.worker_pb2_grpc import WorkerServiceStub
from tests.identity.rig import asked, refused, serving, who_am_i
from tests.patience import PATIENCE_S

Code = grpc.StatusCode


async def test_a_certificate_says_who_calls(authority: Authority, stranger: Authority) -> None:
    ca = authority.folder / "ca.crt"
    async with serving(authority.files("coordinator")) as ports:
        alice = Proof(authority.files("client-alice"))
        assert await who_am_i(ports.certificates, alice) == "client alice"
        code, reason = await refused(ports.certificates, Proof(authority.files("worker-w0")))
        assert code is Code.PERMISSION_DENIED
        assert reason == (
            "/stratagem.v1.CoordinatorService/ListRuns: it is for the scope read, "
            "and the caller is worker w0"
        )
        for nobody in (
            Proof(TlsFiles(ca)),
            Proof(TlsFiles(ca, *_pair(stranger.files("client-alice")))),
            Proof(stranger.files("client-alice")),
            Proof(),
        ):
            assert (await refused(ports.certificates, nobody))[0] is Code.UNAVAILABLE


def _pair(files: TlsFiles) -> tuple[Path, Path]:
    return Path(files.cert or ""), Path(files.key or "")


async def test_a_token_says_who_calls(authority: Authority, tmp_path: Path) -> None:
    book, mine = tmp_path / "tokens.json", tmp_path / "mine"
    token, known = new_token("ci", [Scope.READ])
    add_token(book, known)
    mine.write_text(token)
    server_only = TlsFiles(authority.folder / "ca.crt")
    async with serving(authority.files("coordinator"), book) as ports:
        assert await who_am_i(ports.tokens, Proof(server_only, mine)) == "token ci"
        # This listener asks nobody for a certificate, so one that is there says nothing.
        code, reason = await refused(ports.tokens, Proof(authority.files("client-alice")))
        assert code is Code.UNAUTHENTICATED
        assert "neither a certificate nor a token" in reason
        mine.write_text(new_token("ci", [Scope.READ])[0])
        code, reason = await refused(ports.tokens, Proof(server_only, mine))
        assert code is Code.UNAUTHENTICATED
        assert "not known" in reason
        with pytest.raises(UnauthenticatedError):
            raise from_rpc_error(await _error(ports.tokens, Proof(server_only, mine)))


async def _error(address: str, proof: Proof) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await who_am_i(address, proof)
    return caught.value


async def test_a_token_never_leaves_in_plaintext(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text(new_token("ci", [Scope.READ])[0])
    with pytest.raises(InvalidInputError, match="a token would go to head:7070 in plaintext"):
        open_channel("head:7070", Proof(None, mine))
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        await open_channel(address, Proof(None, mine)).close()


async def test_workers_are_known_by_name_wherever_they_live(authority: Authority) -> None:
    coordinator = Proof(authority.files("coordinator"))

    async def described(address: str, to_worker: str | None, proof: Proof = coordinator) -> str:
        async with open_channel(address, proof, to_worker=to_worker) as channel:
            stub = WorkerServiceStub(channel)
            answer = await stub.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)
            return str(answer.incarnation)

    async with serving(authority.files("worker-w0")) as ports:
        assert await described(ports.certificates, "w0") == "coordinator coordinator"
        assert await described(ports.certificates, "") == "coordinator coordinator"
        for other in ("w1", None):  # no other worker, and no host of that address
            with pytest.raises(grpc.aio.AioRpcError, match="Hostname Verification"):
                await described(ports.certificates, other)
        with pytest.raises(grpc.aio.AioRpcError, match="it is for the role coordinator"):
            await described(ports.certificates, "w0", Proof(authority.files("worker-w1")))
    async with serving(authority.files("pool-gpu")) as ports:
        assert await described(ports.certificates, "c0ffee.gpu") == "coordinator coordinator"
        assert await described(ports.certificates, "") == "coordinator coordinator"
        for other in ("w0", "gpu", "a.b.gpu", "x.cpu", "xgpu", None):
            with pytest.raises(grpc.aio.AioRpcError, match="Hostname Verification"):
                await described(ports.certificates, other)
    async with serving(authority.files("coordinator")) as ports:  # is no worker
        with pytest.raises(grpc.aio.AioRpcError, match="Hostname Verification"):
            await described(ports.certificates, "w0")


async def test_a_clients_certificate_makes_no_server(authority: Authority) -> None:
    async with serving(authority.files("client-alice")) as ports:
        code, reason = await refused(ports.certificates, Proof(authority.files("coordinator")))
        assert code is Code.UNAVAILABLE
        assert "unsupported certificate purpose" in reason


async def test_new_files_count_without_a_restart(
    own_authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides renew; a stream that began before goes on; expired files keep nobody who is in."""
    server_files, alice = own_authority.files("coordinator"), own_authority.files("client-alice")
    async with (
        serving(server_files) as ports,
        open_channel(ports.certificates, Proof(alice), own_connection=True) as channel,
    ):
        assert await asked(channel) == "client alice"
        for role, name, hosts in (
            (Role.COORDINATOR, "coordinator", ["127.0.0.1"]),
            (Role.CLIENT, "alice", []),
        ):
            own_authority.issue(role, name, hosts, timedelta(seconds=-1), renew=True)
        # The server's has expired: who is in stays in, nobody comes in anew.
        old = Proof(alice)
        code, reason = await refused(ports.certificates, old)
        assert code is Code.UNAVAILABLE
        assert "certificate has expired" in reason
        assert await asked(channel) == "client alice"
        monkeypatch.setattr(channels, "_LOOK_EVERY_S", 0.0)
        own_authority.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"], renew=True)
        code, reason = await refused(ports.certificates, old)
        assert code is Code.UNAVAILABLE  # the caller's has
        assert "expired" not in reason
        own_authority.issue(Role.CLIENT, "alice", renew=True)
        assert await who_am_i(ports.certificates, Proof(alice)) == "client alice"
        assert await asked(channel) == "client alice"


async def test_many_calls_at_once_while_files_change(
    own_authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_LOOK_EVERY_S", 0.0)
    server_files, alice = own_authority.files("coordinator"), own_authority.files("client-alice")
    async with (
        serving(server_files) as ports,
        open_channel(ports.certificates, Proof(alice), own_connection=True) as channel,
    ):
        for _ in range(3):
            calls = [asyncio.create_task(asked(channel)) for _ in range(7)]
            own_authority.issue(Role.CLIENT, "alice", renew=True)
            own_authority.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"], renew=True)
            assert await asyncio.gather(*calls) == ["client alice"] * 7

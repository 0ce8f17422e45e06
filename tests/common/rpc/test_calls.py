"""What every call of every service does: version, parsing, errors, and who may connect."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stratagem.common.base import errors
from stratagem.common.process.process import tune_malloc
from stratagem.common.rpc.admission import CallLimits
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.server import add_health, bind, make_server
from stratagem.common.rpc.status_codes import TABLE, from_rpc_error
from stratagem.v1 import worker_pb2, worker_pb2_grpc
from tests.circles import Watched, no_collector
from tests.common.rpc.rig import rpc_errors, serving, stub_of
from tests.patience import PATIENCE_S

SERVICE = "/stratagem.v1.WorkerService/"


class Raiser(worker_pb2_grpc.WorkerServiceServicer):
    """Raises what it is told to; each of the four kinds of call is there once."""

    error: BaseException = errors.NotFoundError("no such thing")

    async def Describe(self, request: Any, context: Any) -> Any:
        raise self.error

    async def GetState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield worker_pb2.GetStateResponse()
        raise self.error

    async def ApplyGradients(self, request_iterator: Any, context: Any) -> Any:
        async for _ in request_iterator:
            pass
        raise self.error

    async def SetState(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            yield worker_pb2.SetStateResponse()
        raise self.error

    async def Abort(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "by hand")

    async def CloseSession(self, request: Any, context: Any) -> Any:
        return worker_pb2.CloseSessionResponse()


def kinds(stub: Any) -> dict[str, Any]:
    """A coroutine per kind of call that reads it to its end."""

    async def drain(call: Any) -> None:
        async for _ in call:
            pass

    async def one(call: Any) -> None:
        await call

    return {
        "unary_unary": lambda: one(stub.Describe(worker_pb2.DescribeRequest())),
        "unary_stream": lambda: drain(stub.GetState(worker_pb2.GetStateRequest())),
        "stream_unary": lambda: one(
            stub.ApplyGradients(iter([worker_pb2.ApplyGradientsRequest()]))
        ),
        "stream_stream": lambda: drain(stub.SetState(iter([worker_pb2.SetStateRequest()]))),
    }


KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
METHODS = ["Describe", "GetState", "ApplyGradients", "SetState"]
ERRORS: list[tuple[Exception, str]] = [
    (errors.InvalidInputError.at("job.lr", "-1 is negative"), "INVALID_ARGUMENT"),
    (errors.OutOfRangeError.at("offset", "7"), "OUT_OF_RANGE"),
    (errors.LimitError("over 3"), "RESOURCE_EXHAUSTED"),
    (errors.IntegrityError("crc"), "DATA_LOSS"),
    (errors.StaleError("term 3"), "FAILED_PRECONDITION"),
    (errors.WrongStateError("is active"), "FAILED_PRECONDITION"),
    (errors.NotFoundError("run x"), "NOT_FOUND"),
    (errors.AlreadyExistsError("run y"), "ALREADY_EXISTS"),
    (errors.ConflictError("closed"), "ABORTED"),
    (errors.UnavailableError("stopping"), "UNAVAILABLE"),
    (errors.RunFailedError("round 3: 2 of 4 updates"), "ABORTED"),
    (errors.UserCodeError("ValueError", "ü", "tb", "w1", "step 3"), "ABORTED"),
]


@pytest.mark.parametrize("kind", KINDS)
async def test_errors_arrive_as_they_were_raised(kind: str) -> None:
    service = Raiser()
    async with serving(service) as port, open_channel(f"127.0.0.1:{port}") as channel:
        for error, code in ERRORS:
            service.error = error
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await kinds(stub_of(channel))[kind]()
            assert raised.value.code().name == code
            assert raised.value.details() == str(error)
            back = from_rpc_error(raised.value)
            assert type(back) is type(error)
            assert str(back) == str(error)
            assert getattr(back, "violations", None) == getattr(error, "violations", None)


def test_every_error_of_the_tree_has_a_code() -> None:
    named = {each for each, _ in TABLE}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.StratagemError):
            assert kind in named or kind is errors.StratagemError


async def test_a_defect_leaks_nothing_and_a_process_without_room_names_no_path() -> None:
    service = Raiser()
    async with serving(service) as port, open_channel(f"127.0.0.1:{port}") as channel:
        service.error = KeyError("secret of the server")
        for call in kinds(stub_of(channel)).values():
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call()
            assert raised.value.code() is grpc.StatusCode.INTERNAL
            assert (raised.value.details() or "").startswith("internal error ")
            everything = f"{raised.value.details()} {raised.value.trailing_metadata()}"
            assert "secret" not in everything
            assert "Traceback" not in everything
        for error in (OSError(errno.ENOSPC, "full", "/secret"), MemoryError("secret")):
            service.error = error
            said = pytest.raises(errors.UnavailableError, match=r"this process .* now")
            with said as back, rpc_errors():
                await kinds(stub_of(channel))[KINDS[0]]()
            assert "secret" not in str(back.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_refused_call_has_held_is_freed_with_it(kind: str) -> None:
    errors_of_calls = Watched()

    class Refusing(Raiser):
        @property
        def error(self) -> BaseException:  # type: ignore[override]
            return errors_of_calls.watch(errors.NotFoundError("no such thing"))

    async with serving(Refusing()) as port, open_channel(f"127.0.0.1:{port}") as channel:
        with no_collector():
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError):
                    await kinds(stub_of(channel))[kind]()
            await errors_of_calls.until_freed()


async def test_timeouts_and_own_aborts_keep_their_code() -> None:
    service = Raiser()
    service.error = TimeoutError("the peer was silent")
    async with serving(service) as port, open_channel(f"127.0.0.1:{port}") as channel:
        stub = stub_of(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="silent") as raised:
            await stub.Describe(worker_pb2.DescribeRequest())
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert isinstance(from_rpc_error(raised.value), errors.UnavailableError)
        with pytest.raises(grpc.aio.AioRpcError, match="by hand") as raised:
            await stub.Abort(worker_pb2.AbortRequest())
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_long_story_still_arrives() -> None:
    service = Raiser()
    service.error = errors.InvalidInputError(
        violations=[errors.Violation(f"field{i}", "é" * 100) for i in range(500)]
    )
    async with serving(service) as port, open_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(errors.InvalidInputError) as raised, rpc_errors():
            await stub_of(channel).Describe(worker_pb2.DescribeRequest())
    assert raised.value.violations[0].field == "field0"
    assert len(raised.value.violations) > 10


@pytest.mark.parametrize("kind", KINDS)
async def test_other_protocol_versions_and_what_does_not_parse_are_refused(kind: str) -> None:
    is_stream, method = kind.startswith("stream"), SERVICE + METHODS[KINDS.index(kind)]
    one = ("stratagem-protocol", "1")
    async with (
        serving(Raiser()) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain,
        open_channel(f"127.0.0.1:{port}") as own,
    ):
        for channel, metadata, said in (
            (plain, [], "says none"),
            (plain, [("stratagem-protocol", "2")], "says '2'"),
            (own, [one], "says '1', '1'"),
        ):
            call = getattr(channel, kind)(method)(
                unended() if is_stream else b"", metadata=metadata
            )
            with pytest.raises(grpc.aio.AioRpcError, match="protocol version") as raised:
                await finish(call)
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert said in (raised.value.details() or "")
        junk = b"\xff\xff\xff"
        with pytest.raises(grpc.aio.AioRpcError, match="does not parse") as raised:
            await finish(getattr(own, kind)(method)(unended(b"", junk) if is_stream else junk))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def unended(*messages: bytes) -> AsyncIterator[bytes]:
    """Requests of a stream that goes on: a refusal that meets a message, or the end, while it is
    written, becomes "Internal error from Core" in gRPC."""
    for message in messages:
        yield message
    await asyncio.Event().wait()


async def finish(call: Any) -> None:
    if hasattr(call, "__aiter__"):
        async for _ in call:
            pass
    else:
        await call


async def test_own_metadata_and_the_rest_of_a_channel_work_up_to_the_limit() -> None:
    async with serving(Raiser()) as port:
        channel = open_channel(f"127.0.0.1:{port}", own_connection=True)
        await channel.channel_ready()
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        call = stub_of(channel).CloseSession(
            worker_pb2.CloseSessionRequest(), metadata=(("x-own", "1"),), timeout=PATIENCE_S
        )
        assert await call == worker_pb2.CloseSessionResponse()
        waiting = asyncio.create_task(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        await channel.close()
        await asyncio.gather(waiting, return_exceptions=True)
    async with serving(Raiser()) as port, open_channel(f"127.0.0.1:{port}") as channel:
        describe: Any = channel.unary_unary(SERVICE + "Describe")
        with pytest.raises(errors.LimitError), rpc_errors():
            await describe(bytes(5 * 2**20))


async def test_other_machines_are_kept_out_unless_they_are_allowed() -> None:
    server = make_server(CallLimits(max_calls=3))
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org", ""):
        with pytest.raises(errors.InvalidInputError, match="neither encrypted"):
            bind(server, host, 0)
    assert bind(server, "0.0.0.0", 0, allow_insecure_network=True) > 0
    port = bind(server, "localhost", 0)
    await server.start()
    other = make_server()
    with pytest.raises(errors.UnavailableError, match=f"localhost:{port}"):
        bind(other, "localhost", port)
    await other.stop(None)
    await server.stop(None)


async def test_health_needs_no_protocol_version() -> None:
    server = make_server()
    health = add_health(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        await health.enter_graceful_shutdown()
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(None)


def test_malloc_respects_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("MALLOC_", "LD_PRELOAD", "STRATAGEM_MALLOC")):
            monkeypatch.delenv(name)
    code = f"from {tune_malloc.__module__} import tune_malloc; print(tune_malloc())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "tuned" in run.stdout
    for name, value, said in (
        ("STRATAGEM_MALLOC", "off", "STRATAGEM_MALLOC=off"),
        ("MALLOC_ARENA_MAX", "1", "MALLOC_ARENA_MAX set by the operator"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert said in tune_malloc()


async def test_nobody_is_found_where_nobody_listens_nor_on_a_channel_that_was_closed() -> None:
    """Whoever has found that the other side is gone closes it, under those who still call."""
    async with open_channel("127.0.0.1:1") as channel:
        stub = stub_of(channel)
    for call in kinds(stub).values():
        with pytest.raises(errors.UnavailableError, match=r"channel to 127\.0\.0\.1:1 is closed"):
            await call()
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(errors.UnavailableError), rpc_errors():
            await stub_of(channel).Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)

"""The rules of taking requests in, on a server without a cluster around it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from stratagem.common.base import errors
from stratagem.common.rpc.admission import CallLimits
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.server import add_health, bind, make_server
from stratagem.common.rpc.status_codes import from_rpc_error, shown
from stratagem.v1 import worker_pb2, worker_pb2_grpc
from tests.hostile.attack import lawless_channel, say
from tests.hostile.promises import method
from tests.patience import AT_ONCE_S, PATIENCE_S

Code = grpc.StatusCode


class Waiter(worker_pb2_grpc.WorkerServiceServicer):
    """GetState answers once and then waits; Describe raises what it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def GetState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield worker_pb2.GetStateResponse()
        await asyncio.Event().wait()

    async def Describe(self, request: Any, context: Any) -> Any:
        if self.error is not None:
            raise self.error
        return worker_pb2.DescribeResponse()

    async def Abort(self, request: Any, context: Any) -> Any:
        return worker_pb2.AbortResponse()


@asynccontextmanager
async def serving(limits: CallLimits, waiter: Waiter | None = None) -> AsyncIterator[str]:
    server = make_server(limits)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(waiter or Waiter(), server)
    add_health(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_too_many_calls_are_told_when_to_come_back() -> None:
    async with (
        serving(CallLimits(max_calls=2, unlimited=("Abort",))) as address,
        open_channel(address) as channel,
    ):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        held = [stub.GetState(worker_pb2.GetStateRequest()) for _ in range(2)]
        for call in held:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Describe(worker_pb2.DescribeRequest())
        error = from_rpc_error(refused.value)
        assert isinstance(error, errors.LimitError)
        assert str(error) == "max_calls: 2 calls are open, the limit is 2"
        assert error.retry_after_s == 1.0
        await stub.Abort(worker_pb2.AbortRequest())
        held[0].cancel()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await stub.Describe(worker_pb2.DescribeRequest())
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0)


async def test_a_call_brings_its_request_in_time() -> None:
    async with (
        serving(CallLimits(idle_timeout_s=2 * AT_ONCE_S)) as address,
        lawless_channel(address) as channel,
    ):
        nothing = await say(channel, method("Describe"), [])
        twice = await say(channel, method("Describe"), [b"", b""])
    async with (
        serving(CallLimits(idle_timeout_s=0.2)) as address,
        lawless_channel(address) as channel,
    ):
        silent = await say(channel, method("Describe"), [], is_last=False)
    assert (nothing.code, silent.code, twice.code) == (
        Code.INVALID_ARGUMENT,
        Code.DEADLINE_EXCEEDED,
        Code.OK,
    )
    assert nothing.reason == "request: is missing: the call ended without one"
    assert silent.reason == "the request did not arrive within 0.2 s"


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidInputError.at("x" * 5000, "\U0001f9e8" * 5000),
        errors.InvalidInputError(
            violations=[errors.Violation(f"f{n}", "ä" * 300) for n in range(500)]
        ),
        errors.NotFoundError("\U0001f9e8" * 100_000),
        errors.UserCodeError("T" * 9000, "\U0001f9e8" * 9000, "", "w" * 9000, "a" * 9000),
    ],
    ids=["field", "violations", "message", "user"],
)
async def test_any_reason_fits_into_the_headers(error: Exception) -> None:
    waiter = Waiter()
    waiter.error = error
    async with serving(CallLimits(), waiter) as address, open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Describe(worker_pb2.DescribeRequest())
    assert type(from_rpc_error(refused.value)) is type(error)


def test_reasons_move_no_cursor() -> None:
    assert shown("a\x1b[2Jb\x00\u202ec\nd\te") == "a\\x1b[2Jb\\x00\\x202ec\nd\te"
    assert shown("ä" * 1000, 101) == "ä" * 49 + "..."


async def test_health_checks_that_do_not_parse_are_the_callers_fault() -> None:
    async with serving(CallLimits()) as address, open_channel(address) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check(b"\xff\xff")
        assert refused.value.code() is Code.INVALID_ARGUMENT
        answer = health_pb2.HealthCheckResponse.FromString(await check(b""))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watching: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watch = watching(b"")
        first = health_pb2.HealthCheckResponse.FromString(await watch.read())
        assert first.status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()

"""Heartbeats over a real server: standing calls, the single calls of older workers, and ends."""

import asyncio
from pathlib import Path
from typing import Any

import grpc

from stratagem.common.numerics.rules import CURRENT
from stratagem.common.rpc.channel import open_channel
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.coordinator.service.serving import coordinator, refused, served, submit, worker
from tests.patience import PATIENCE_S

Code = grpc.StatusCode


def hello(worker_id: str, **fields: Any) -> pb.HeartbeatStreamRequest:
    return pb.HeartbeatStreamRequest(worker_id=worker_id, incarnation="one", **fields)


HELLO = hello("w")
BEAT = pb.HeartbeatStreamRequest()


async def register(stub: Any, address: str) -> pb.RegisterWorkerResponse:
    request = pb.RegisterWorkerRequest(
        worker_id="w",
        incarnation="one",
        address=address,
        capability=types_pb2.Capability(device="cpu", num_threads=1, numerics_rules=CURRENT),
    )
    answer: pb.RegisterWorkerResponse = await stub.RegisterWorker(request)
    return answer


async def said(call: Any, beat: pb.HeartbeatStreamRequest) -> pb.HeartbeatStreamResponse:
    await call.write(beat)
    return await heard(call)


async def heard(call: Any) -> pb.HeartbeatStreamResponse:
    async with asyncio.timeout(PATIENCE_S):
        answer: pb.HeartbeatStreamResponse = await call.read()
        return answer


async def is_alive(stub: Any) -> bool:
    (info,) = (await stub.ListWorkers(pb.ListWorkersRequest())).workers
    return bool(info.is_alive)


async def test_a_stream_says_what_a_single_beat_says_and_how_often_to_beat(tmp_path: Path) -> None:
    async with (
        coordinator(tmp_path, heartbeat_interval_s=60.0, worker_ttl_s=PATIENCE_S) as stub,
        worker("one") as address,
    ):
        told = await register(stub, address)
        assert (told.heartbeat_interval_s, told.lease_ttl_s) == (60.0, PATIENCE_S)
        single = await stub.Heartbeat(pb.HeartbeatRequest(worker_id="w", incarnation="one"))
        call = stub.HeartbeatStream()
        for number, beat in ((1, HELLO), (2, BEAT)):
            answer = await said(call, beat)
            assert (answer.term, answer.released) == (single.term, single.released)
            assert (answer.num_beats, answer.interval_s) == (number, 60.0)
            assert answer.lease_ttl_s == PATIENCE_S
            assert answer.time_s >= single.time_s
        await call.done_writing()
        assert await call.code() is Code.OK
        assert await is_alive(stub)


async def test_a_stream_that_breaks_loses_nobody_and_a_restart_takes_the_next_one(
    tmp_path: Path,
) -> None:
    async with worker("one") as address:
        async with served(tmp_path) as (app, target), open_channel(target) as channel:
            stub = CoordinatorServiceStub(channel)
            await register(stub, address)
            broken = stub.HeartbeatStream()
            await said(broken, HELLO)
            broken.cancel()
            call = stub.HeartbeatStream()
            assert (await said(call, HELLO)).num_beats == 1
            assert (await is_alive(stub), app.heartbeats.num_open) == (True, 1)
        # The call ends with its coordinator; nobody registers again with the next one.
        assert await call.code() in (Code.UNAVAILABLE, Code.CANCELLED)
        async with served(tmp_path) as (app, target), open_channel(target) as channel:
            stub = CoordinatorServiceStub(channel)
            assert await is_alive(stub)
            call = stub.HeartbeatStream()
            assert (await said(call, HELLO)).term == 2
            assert app.loop.facts["WorkerRegistered"] == app.loop.facts["WorkerLost"] == 0


async def test_the_end_of_its_run_is_told_to_a_worker_at_once(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as stub, worker("one") as address:
        await register(stub, address)
        await stub.SubmitRun(submit("r-1"))
        call = stub.HeartbeatStream()
        assert not (await said(call, hello("w", for_run="r-1"))).released
        await stub.CancelRun(pb.CancelRunRequest(run_id="r-1"))
        answer = await heard(call)
        assert (answer.released, answer.num_beats, answer.run_unknown) == (True, 1, False)
        call.cancel()
        answer = await said(stub.HeartbeatStream(), hello("w", for_run="r-2"))
        assert (answer.released, answer.run_unknown) == (True, True)


async def test_a_worker_that_leaves_is_known_to_no_stream(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as stub, worker("one") as address:
        await register(stub, address)
        call = stub.HeartbeatStream()
        await said(call, HELLO)
        assert (await said(call, pb.HeartbeatStreamRequest(draining=True))).num_beats == 2
        (info,) = (await stub.ListWorkers(pb.ListWorkersRequest())).workers
        assert info.reason == "draining"
        await stub.Leave(pb.LeaveRequest(worker_id="w", incarnation="one"))
        assert await call.code() is Code.NOT_FOUND
        assert not (await stub.ListWorkers(pb.ListWorkersRequest())).workers


async def test_a_stream_that_says_what_is_wrong_is_ended(tmp_path: Path) -> None:
    wrong: list[tuple[list[Any], grpc.StatusCode, str]] = [
        ([], Code.INVALID_ARGUMENT, "worker_id"),
        ([BEAT], Code.INVALID_ARGUMENT, "incarnation"),
        ([HELLO, HELLO], Code.INVALID_ARGUMENT, "worker_id"),
        ([hello("w", for_run="../x")], Code.INVALID_ARGUMENT, ""),
        ([hello("v")], Code.NOT_FOUND, "'v'"),
    ]
    async with coordinator(tmp_path) as stub, worker("one") as address:
        await register(stub, address)
        for messages, code, reason in wrong:
            ended, details = await refused(_all(stub.HeartbeatStream(iter(messages))))
            assert ended is code
            assert reason in details
            assert await is_alive(stub)


async def test_a_stream_without_a_message_ends_in_time(tmp_path: Path) -> None:
    async with coordinator(tmp_path, stream_idle_timeout_s=0.05) as stub:
        call = stub.HeartbeatStream()
        code, reason = await refused(call.read())
        assert code is Code.DEADLINE_EXCEEDED
        assert "first frame" in reason


async def _all(call: Any) -> None:
    async for _ in call:
        pass

"""The worker's end of its tunnel: streams to the coordinator, by which others reach it.

A worker that others cannot dial keeps one stream parked at the coordinator. The first frame that
comes over it begins a connection, which is relayed to this process's gRPC server, and the next
stream is parked. The coordinator dials a broken connection again, so nothing is numbered or
repeated here.
"""

import asyncio
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog

from stratagem.common.base.errors import StratagemError
from stratagem.common.base.retry import Backoff
from stratagem.common.rpc.channel import (
    CoordinatorChannel,
    Coordinators,
    Proof,
    open_channel,
    write_message,
)
from stratagem.common.rpc.probe import identity_problem
from stratagem.common.rpc.streams import PARKED, copy_both_ways
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub

if TYPE_CHECKING:  # the asynchronous stubs exist only for type checkers
    from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 30.0
PARK_TIMEOUT_S: Final = 20.0
"""Seconds within which the coordinator must confirm that a stream is parked."""
SETTLED_S: Final = 1.0
"""Seconds after which a parked stream is replaced at once when it ends."""
CLOSE_TIMEOUT_S: Final = 2.0
LOOK_AGAIN_EVERY: Final = 10
"""Consecutive failures after which the connection is examined again for an identity problem."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Tunnel:
    """Keeps a stream parked at the coordinator; one per process, run as a task."""

    coordinators: Coordinators
    worker_id: str
    incarnation: str
    server_path: str
    """The unix socket of this process's gRPC server."""
    proof: Proof
    proxy: str = ""
    is_parked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first stream has been parked."""
    _carried: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Keep one stream parked until cancelled, whatever happens to earlier ones."""
        # Heartbeats and uploads must not wait behind the traffic of the tunnel.
        open_own = partial(
            open_channel, proof=self.proof, own_connection=True, is_shallow=True, proxy=self.proxy
        )
        backoff, num_failed = Backoff(FIRST_RETRY_S, LAST_RETRY_S, least=0.0), 0
        async with CoordinatorChannel(self.coordinators, open_own) as channel:
            stub = CoordinatorServiceStub(channel)
            try:
                while True:
                    asked, began_s = self.coordinators.present, time.monotonic()
                    error = await self._ending(stub)
                    if time.monotonic() - began_s >= SETTLED_S:
                        backoff.reset()
                        num_failed = 0
                    await self._report(num_failed, error, asked)
                    num_failed += 1
                    await backoff.pause()
            finally:
                await self._close()

    async def _ending(self, stub: "CoordinatorServiceAsyncStub") -> Exception:
        """Park streams one after the other until one fails; return the error."""
        while True:
            began_s, call = time.monotonic(), stub.Relay()
            try:
                first = await self._parked(call)
            except (grpc.aio.AioRpcError, StratagemError, TimeoutError) as error:
                return error
            if first is not None:
                task = asyncio.create_task(self._carry(call, first))
                self._carried.add(task)  # the loop itself holds no task
                task.add_done_callback(self._carried.discard)
            elif time.monotonic() - began_s < SETTLED_S:
                return StratagemError("the coordinator ended the stream at once")

    async def _parked(self, call: Any) -> bytes | None:
        """Park a stream; return its first bytes, or None if it must be replaced."""
        hello = pb.RelayRequest(worker_id=self.worker_id, incarnation=self.incarnation)
        frame: Any = grpc.aio.EOF
        try:
            async with asyncio.timeout(PARK_TIMEOUT_S):
                await call.wait_for_connection()
                await write_message(call, hello)
                metadata = await call.initial_metadata()
            if set(PARKED) <= {tuple(pair) for pair in metadata or ()}:
                if not self.is_parked.is_set():
                    log.info("tunnel open", coordinator=self.coordinators.present)
                self.is_parked.set()
            frame = await call.read()
        finally:
            if frame is grpc.aio.EOF:
                call.cancel()
        return None if frame is grpc.aio.EOF else bytes(frame.data)

    async def _carry(self, call: Any, first: bytes) -> None:
        """Relay one connection to this process's server until either side ends."""
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)

        async def receive() -> bytes | None:
            frame = await call.read()
            return None if frame is grpc.aio.EOF else frame.data

        async def send(data: bytes) -> None:
            await write_message(call, pb.RelayRequest(data=data))

        try:
            await loop.sock_connect(connection, self.server_path)
            await loop.sock_sendall(connection, first)
            await copy_both_ways(connection, receive, send, call.done_writing)
        except grpc.aio.AioRpcError as error:
            log.info("tunnelled connection broke", code=error.code().name, details=error.details())
        except (OSError, StratagemError) as error:  # the process is ending, or a frame is wrong
            log.info("tunnelled connection ended", reason=str(error))
        finally:
            connection.close()
            call.cancel()

    async def _close(self) -> None:
        """Wait briefly for relayed connections to end, then cut the others."""
        carried = set(self._carried)
        if carried:
            await asyncio.wait(carried, timeout=CLOSE_TIMEOUT_S)
        for task in carried:
            task.cancel()
        await asyncio.gather(*carried, return_exceptions=True)

    async def _report(self, num_before: int, error: Exception, asked: str) -> None:
        """Log a failure: the first of a series as a warning, others as debug; problems of identity
        always as warnings."""
        level = log.debug if num_before else log.warning
        if not isinstance(error, grpc.aio.AioRpcError):
            if isinstance(error, TimeoutError):
                self.coordinators.move_on(asked)  # a frozen coordinator answers no calls
            level("no tunnel", coordinator=asked, reason=str(error) or "no answer in time")
            return
        details = error.details()
        if num_before % LOOK_AGAIN_EVERY == 0:
            problem = await identity_problem(error, asked, self.proof, proxy=self.proxy)
            details, level = problem or details, log.warning if problem else level
        level("no tunnel", coordinator=asked, code=error.code().name, details=details)

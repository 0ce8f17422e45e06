"""Calls to a coordinator that may be away for a while, or to several of which one leads.

Owns the one rule of reconnecting: the first call of a client fails at once when none answers, so
that a wrong address is seen; after that a restarting coordinator is waited for with jittered
backoff, and so is the next leader where one only stands by. Errors leave this module as the tree of
common.errors, never as gRPC's.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, cast

import grpc

from stratagem.client.sdk.connection.fork_safety import check_fork, is_lost, note_closed, note_open
from stratagem.client.sdk.connection.outage_notice import OutageNotice, ToldOutage
from stratagem.common.base.errors import (
    InProgressError,
    InvalidInputError,
    StandbyError,
    StratagemError,
    UnauthenticatedError,
    UnavailableError,
)
from stratagem.common.base.retry import Backoff
from stratagem.common.process.process import tune_malloc
from stratagem.common.rpc.channel import (
    PLAINTEXT,
    CoordinatorChannel,
    Coordinators,
    Proof,
    open_channel,
    split_addresses,
)
from stratagem.common.rpc.probe import identity_problem
from stratagem.common.rpc.status_codes import from_rpc_error, name_of
from stratagem.common.rpc.streams import has_begun
from stratagem.common.rpc.tensor_transfer import Retry
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub

if TYPE_CHECKING:
    from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

CALL_TIMEOUT_S: Final = 30.0
ONE_OF_SEVERAL_TIMEOUT_S: Final = 10.0
"""Where another coordinator can be asked instead of one that is frozen."""
SILENT_S: Final = 2.0
"""A stream without news is nothing unusual, but then each coordinator of several is asked."""
STARTING_S: Final = 15.0
"""How long an address may take to answer that takes connections and closes them, as Docker's does
for a container that does not listen yet, or whose coordinator has no lead yet."""
_CLOSED: Final = ("Socket closed", "Connection reset by peer")
MIN_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 2.0

Request = TypeVar("Request")
Response = TypeVar("Response")

log = logging.getLogger("stratagem.client")


class Connection:
    """A channel to one coordinator, which notes whether a coordinator has answered on it."""

    def __init__(self, address: str, patience_s: float, proof: Proof = PLAINTEXT) -> None:
        """address: host:port, or several with commas, of which one leads.

        patience_s: how long a single call waits for a coordinator that has gone away.
        proof: what the coordinator is shown, and how it is known.
        """
        note_open(self)
        log.debug(
            tune_malloc()
        )  # before the first state is streamed; STRATAGEM_MALLOC=off leaves it
        self.address = address
        self._proof = proof
        self._patience_s = patience_s
        try:
            self._coordinators = Coordinators(split_addresses(address))
        except ValueError as error:
            raise InvalidInputError.at("coordinator", str(error)) from None
        self._channel = CoordinatorChannel(self._coordinators, partial(open_channel, proof=proof))
        self._has_answered = False
        self._num_unanswered = 0
        self._outage = ToldOutage()
        several = self._coordinators.are_several
        self._timeout_s = ONE_OF_SEVERAL_TIMEOUT_S if several else CALL_TIMEOUT_S
        self.stub: CoordinatorServiceAsyncStub = CoordinatorServiceStub(self._channel)

    async def close(self) -> None:
        if is_lost():
            return  # the channel belongs to the process of which this one is a fork
        note_closed(self)
        await self._channel.close()

    async def call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Response], request: Request
    ) -> Response:
        """Make one unary call; every call of the service may be repeated."""
        check_fork()
        backoff = Backoff(MIN_PAUSE_S, MAX_PAUSE_S)
        began_s = time.monotonic()
        with OutageNotice(self.address, self._outage) as notice:
            while True:
                asked = self._coordinators.present
                try:
                    response = await method(request, timeout=self._timeout_s)
                except grpc.aio.AioRpcError as error:
                    notice.met()
                    wait_s = await self._wait_s(error, asked)
                    if _is_at_work(error):  # an answer, from which on its patience counts
                        self._has_answered, began_s = True, time.monotonic()
                        backoff.reset()
                    if time.monotonic() >= began_s + wait_s:
                        notice.ended(error)
                        raise self.translated(error) from None
                    waits = "until it can" if wait_s == math.inf else f"for up to {wait_s:g} s"
                    notice.failed(error, waits)
                    await backoff.pause()
                else:
                    self._has_answered = True
                    notice.answered()
                    return response

    async def _wait_s(self, error: grpc.aio.AioRpcError, asked: str) -> float:
        """Return for how long from its begin on a call that met this error is made again."""
        await self._raise_identity_problem(error, asked)
        if _is_at_work(error):
            return math.inf  # it will say how it ends
        if self.may_retry(error, asked):
            return self._patience_s
        return min(self._patience_s, STARTING_S) if _is_starting(error) else 0.0

    async def greet(self) -> None:
        """Make one cheap call, which distinguishes a wrong address from a coordinator that goes
        away later."""
        if not self._has_answered:
            await self.call(self.stub.ListWorkers, pb.ListWorkersRequest(page_size=1))

    async def follow(
        self, open_stream: Callable[[], grpc.aio.UnaryStreamCall[Request, Response]]
    ) -> AsyncIterator[Response]:
        """The messages of a stream, which is opened again when it is cut.

        open_stream is called for every attempt and knows from where to continue.
        """
        check_fork()
        backoff = Backoff(MIN_PAUSE_S, MAX_PAUSE_S)
        with OutageNotice(self.address, self._outage) as notice:
            while True:
                asked = self._coordinators.present
                stream = open_stream()
                begin = asyncio.create_task(self._note_begin(stream, backoff, notice))
                try:
                    async for message in self._messages(stream):
                        self._has_answered = True
                        backoff.reset()
                        notice.answered()
                        yield message
                    return
                except grpc.aio.AioRpcError as error:
                    notice.met()
                    await self._raise_identity_problem(error, asked)
                    if not self.may_retry(error, asked):
                        notice.ended(error)
                        raise self.translated(error) from None
                    log.info("coordinator at %s is away: %s", asked, error.details())
                    notice.failed(error, "until one does")
                finally:
                    begin.cancel()
                    stream.cancel()
                await backoff.pause()

    async def _note_begin(
        self,
        stream: grpc.aio.UnaryStreamCall[Request, Response],
        backoff: Backoff,
        notice: OutageNotice,
    ) -> None:
        """Note that a coordinator follows, before there is news; an earlier one does not say so."""
        with suppress(grpc.aio.AioRpcError):
            if has_begun(await stream.initial_metadata()):
                self._has_answered = True
                backoff.reset()
                notice.answered()

    async def _messages(
        self, stream: grpc.aio.UnaryStreamCall[Request, Response]
    ) -> AsyncIterator[Response]:
        """Yield the messages of a stream. If there are several coordinators, a silent one is called
        now and then to see that it still answers, so that a frozen one is found out and the next
        one is tried."""
        if not self._coordinators.are_several:
            async for message in stream:
                yield message
            return
        while True:
            reading = asyncio.ensure_future(stream.read())
            try:
                while not (await asyncio.wait([reading], timeout=SILENT_S))[0]:
                    await self.stub.ListWorkers(
                        pb.ListWorkersRequest(page_size=1), timeout=SILENT_S
                    )
                answer = await reading
            finally:
                reading.cancel()
            if answer is grpc.aio.EOF:
                return
            yield cast("Response", answer)

    @property
    def stream_retry(self) -> Retry:
        """Return the retry policy of the tensor streams, which repeat by themselves; call greet()
        first."""
        num_pauses = math.ceil(self._patience_s / MAX_PAUSE_S)
        return Retry(max_attempts=num_pauses + 1, max_pause_s=MAX_PAUSE_S)

    def may_retry(self, error: grpc.aio.AioRpcError, asked: str) -> bool:
        """The coordinator is restarting or gone, and was there before; or another one may lead."""
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and self._coordinators.are_several:
            self._coordinators.move_on(asked)  # it is frozen
            return True
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            # The latter is the last word of a process that ends; our own cancelling is no error.
            return False
        if self._coordinators.are_several and name_of(error) == StandbyError.__name__:
            self._has_answered = True  # there is a cluster, and soon a leader
        self._num_unanswered += 1
        return self._has_answered or self._num_unanswered < len(self._coordinators.addresses)

    async def _raise_identity_problem(self, error: grpc.aio.AioRpcError, asked: str) -> None:
        """Raise the error that says why one side rejects the other's identity, or a proxy the
        address: waiting does not help. A proxy that is away is waited for as a coordinator is."""
        if name_of(error):
            return
        problem = await identity_problem(error, asked, self._proof, lasting=True)
        if problem:
            raise UnauthenticatedError(problem) from None
        if self._has_answered or self._coordinators.are_several:
            return
        problem = await identity_problem(error, asked, self._proof)
        if problem:
            raise UnavailableError(problem) from None

    def translated(self, error: grpc.aio.AioRpcError) -> StratagemError:
        is_away = error.code() is grpc.StatusCode.UNAVAILABLE and not name_of(error)
        if is_away and not self._has_answered:
            details = error.details() or ""
            refused = "Connection refused" in details
            reason = "connection refused" if refused else details
            return UnavailableError(f"no coordinator answers at {self.address}: {reason}")
        return from_rpc_error(error)


def _is_at_work(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a coordinator is there, and does what it is asked for."""
    return name_of(error) == InProgressError.__name__


def _is_starting(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a server that is still starting closed the connection or has no leader yet."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    reason = from_rpc_error(error)
    if isinstance(reason, StandbyError):
        return not reason.leader  # one that leads elsewhere is for the caller to know
    return any(phrase in (error.details() or "") for phrase in _CLOSED)

"""Call a coordinator that may be away for a while, or several coordinators of which one leads.

The first call of a client fails at once when no coordinator answers, so a wrong address is
noticed. After that the client waits with jittered backoff for a restarting coordinator, or for the
next leader. Errors leave this module as those of common/base/errors.py, never as gRPC's.
"""

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar, cast
from weakref import WeakSet

import grpc

from stratagem.common.base.errors import (
    InProgressError,
    InvalidInputError,
    StandbyError,
    StratagemError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
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
from stratagem.common.rpc.status_codes import from_rpc_error, name_of, shown
from stratagem.common.rpc.streams import has_begun
from stratagem.common.rpc.tensor_transfer import Retry
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub

if TYPE_CHECKING:
    from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

# ---- Notice of an outage ----
#
# A notice says once that calls wait for a coordinator: why, and for what.

REPORTED_AFTER_S: Final = 1.0
"""The duration from which an outage is logged: shorter ones are a restart or a change of leader."""


_NO_ANSWERS: Final = frozenset(
    (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
)
"""The gRPC status codes that gRPC itself makes when no server has answered."""


@dataclass(slots=True)
class SharedOutage:
    """The state of an outage that all calls over a connection share, so that it is logged once."""

    is_reported: bool = False
    """The outage has been logged, and no call has been answered since."""
    refused: Counter[str] = field(default_factory=Counter)
    """The number of calls that are being refused, keyed by reason; the first of them has logged the
    reason. A refusal does not end when other calls are answered."""
    num_answers: int = 0
    """The number of answers to any call so far."""

    def end(self) -> None:
        """Record that a coordinator has answered."""
        self.is_reported = False
        self.num_answers += 1


@dataclass(slots=True)
class OutageNotice:
    """Context manager around one call or stream that logs each outage and each refusal once."""

    address: str
    outage: SharedOutage
    _since_s: float | None = field(default=None, init=False)
    _is_reported: bool = field(default=False, init=False)
    """An outage has been logged by this call."""
    _reasons: set[str] = field(default_factory=set, init=False)
    """The reasons for which this call was refused so far."""
    _met_after: int | None = field(default=None, init=False)
    """The value of num_answers at the time of the error that is being examined."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_refusal()

    def note_answer(self) -> None:
        """Record that a coordinator has answered this call."""
        self._since_s, self._is_reported = None, False
        self.outage.end()
        self._end_refusal()

    def note_error(self) -> None:
        """Note the time of an error before its cause is known: if another call is answered before
        that, there is no outage any more."""
        self._met_after = self.outage.num_answers

    def note_end(self, error: grpc.RpcError) -> None:
        """Record the error that ends this call; one that the coordinator has sent is an answer."""
        if name_of(error) or error.code() not in _NO_ANSWERS:
            self.note_answer()

    def note_retry(self, error: grpc.RpcError, waits: str) -> None:
        """Record an error after which the call is retried; log the outage if it has lasted long
        enough, and each reason of a refusal once.

        waits: a text on how long the call waits, such as "for up to 60 s".
        """
        name = name_of(error)
        if name and name != StandbyError.__name__:  # a standby answers only for itself
            self.outage.end()
        if self._since_s is None:
            self._since_s = time.monotonic()
        is_over = not name and self._met_after not in (None, self.outage.num_answers)
        has_lasted = time.monotonic() - self._since_s >= REPORTED_AFTER_S and not is_over
        if has_lasted and self._is_first(self._text(error), is_refusal=bool(name)):
            log.warning("%s; trying again %s", self._text(error), waits)

    def _is_first(self, message: str, *, is_refusal: bool) -> bool:
        """Return whether no call has logged this message yet, and mark it as logged."""
        if not is_refusal:
            if self._is_reported:  # reported, though the outage may be over for others
                return False
            was_told = self.outage.is_reported
            self._is_reported = self.outage.is_reported = True
            return not was_told
        if message in self._reasons:
            return False
        self._reasons.add(message)
        self.outage.refused[message] += 1
        return self.outage.refused[message] == 1

    def _end_refusal(self) -> None:
        self.outage.refused -= Counter(self._reasons)  # drops counts of 0
        self._reasons.clear()

    def _text(self, error: grpc.RpcError) -> str:
        details = shown(error.details() or "") or error.code().name
        if name_of(error):
            return f"the coordinator at {self.address} cannot do it now: {details}"
        return _no_answer(self.address, details)


def _no_answer(address: str, details: str) -> str:
    why = "connection refused" if "Connection refused" in details else details
    return f"no coordinator answers at {address}: {why}"


# ---- Retries ----

CALL_TIMEOUT_S: Final = 30.0
ONE_OF_SEVERAL_TIMEOUT_S: Final = 10.0
"""The timeout of a call if there are other coordinators to try."""
SILENT_S: Final = 2.0
"""The silence after which a stream checks its coordinator, if there are several."""
STARTING_S: Final = 15.0
"""The time allowed for startup if an address accepts and closes connections, as Docker's does while
a container does not listen yet, or if its coordinator does not know a leader yet."""
_CLOSED: Final = ("Socket closed", "Connection reset by peer")
MIN_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 2.0

Request = TypeVar("Request")
Response = TypeVar("Response")

log = logging.getLogger("stratagem.client")


class Connection:
    """A connection to one coordinator, or to several of which one leads; it retries calls."""

    def __init__(self, address: str, patience_s: float, proof: Proof = PLAINTEXT) -> None:
        """Prepare a channel; it connects at the first call.

        address: host:port, or several separated by commas, of which one leads. patience_s: how long
        a single call waits for a coordinator that has gone away. proof: the identity shown to the
        coordinator, and the means to verify the coordinator's.
        """
        check_fork()
        _open.add(self)
        # Before the first state is streamed; STRATAGEM_MALLOC=off leaves it.
        log.debug(tune_malloc())
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
        self._outage = SharedOutage()
        several = self._coordinators.are_several
        self._timeout_s = ONE_OF_SEVERAL_TIMEOUT_S if several else CALL_TIMEOUT_S
        self.stub: CoordinatorServiceAsyncStub = CoordinatorServiceStub(self._channel)

    async def close(self) -> None:
        if is_lost():
            return  # the channel belongs to the parent process
        _open.discard(self)
        await self._channel.close()

    async def call(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Response], request: Request
    ) -> Response:
        """Make one unary call, retried with backoff; all calls of the service are idempotent."""
        check_fork()
        backoff = Backoff(MIN_PAUSE_S, MAX_PAUSE_S)
        began_s = time.monotonic()
        with OutageNotice(self.address, self._outage) as notice:
            while True:
                asked = self._coordinators.present
                try:
                    response = await method(request, timeout=self._timeout_s)
                except grpc.aio.AioRpcError as error:
                    notice.note_error()
                    wait_s = await self._wait_s(error, asked)
                    if _is_at_work(error):  # an answer, from which its patience is counted
                        self._has_answered, began_s = True, time.monotonic()
                        backoff.reset()
                    if time.monotonic() >= began_s + wait_s:
                        notice.note_end(error)
                        raise self.translated(error) from None
                    waits = "until it can" if wait_s == math.inf else f"for up to {wait_s:g} s"
                    notice.note_retry(error, waits)
                    await backoff.pause()
                else:
                    self._has_answered = True
                    notice.note_answer()
                    return response

    async def _wait_s(self, error: grpc.aio.AioRpcError, asked: str) -> float:
        """Return how long a call is retried, from its start, after this error; 0 if not at all."""
        await self._raise_identity_problem(error, asked)
        if _is_at_work(error):
            return math.inf  # it will answer when it is done
        if self.may_retry(error, asked):
            return self._patience_s
        return min(self._patience_s, STARTING_S) if _is_starting(error) else 0.0

    async def greet(self) -> None:
        """Make one cheap call before others are retried: it fails at once if the address is wrong,
        which would otherwise look like an outage."""
        if not self._has_answered:
            await self.call(self.stub.ListWorkers, pb.ListWorkersRequest(page_size=1))

    async def follow(
        self, open_stream: Callable[[], grpc.aio.UnaryStreamCall[Request, Response]]
    ) -> AsyncIterator[Response]:
        """Yield the messages of a stream, which is reopened if it is interrupted.

        open_stream: called for every attempt; it opens the stream where the last attempt stopped.
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
                        notice.note_answer()
                        yield message
                    return
                except grpc.aio.AioRpcError as error:
                    notice.note_error()
                    await self._raise_identity_problem(error, asked)
                    if not self.may_retry(error, asked):
                        notice.note_end(error)
                        raise self.translated(error) from None
                    log.info("coordinator at %s is away: %s", asked, error.details())
                    notice.note_retry(error, "until one does")
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
        """Record an answer as soon as the coordinator acknowledges the stream, before any message;
        early versions do not acknowledge."""
        with suppress(grpc.aio.AioRpcError):
            if has_begun(await stream.initial_metadata()):
                self._has_answered = True
                backoff.reset()
                notice.note_answer()

    async def _messages(
        self, stream: grpc.aio.UnaryStreamCall[Request, Response]
    ) -> AsyncIterator[Response]:
        """Yield the messages of one stream. With several coordinators, a silent stream's
        coordinator is checked now and then: if it hangs, an error makes the caller try the next
        one."""
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
        """Return the retry policy of tensor streams, which retry themselves; call greet() first."""
        num_pauses = math.ceil(self._patience_s / MAX_PAUSE_S)
        return Retry(max_attempts=num_pauses + 1, max_pause_s=MAX_PAUSE_S)

    def may_retry(self, error: grpc.aio.AioRpcError, asked: str) -> bool:
        """Return whether a retry may succeed: the coordinator has answered before and is away, or
        another one may be the leader."""
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and self._coordinators.are_several:
            self._coordinators.move_on(asked)  # it is frozen
            return True
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            # CANCELLED comes from a process that ends; our own cancelling is not an error.
            return False
        if self._coordinators.are_several and name_of(error) == StandbyError.__name__:
            self._has_answered = True  # there is a cluster, and soon a leader
        self._num_unanswered += 1
        return self._has_answered or self._num_unanswered < len(self._coordinators.addresses)

    async def _raise_identity_problem(self, error: grpc.aio.AioRpcError, asked: str) -> None:
        """Raise an error if client or server rejects the other's identity, or a proxy rejects the
        address: waiting does not help. A proxy that is away is waited for like a coordinator."""
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
            return UnavailableError(_no_answer(self.address, error.details() or ""))
        return from_rpc_error(error)


def _is_at_work(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the error says that the coordinator is still working on the request."""
    return name_of(error) == InProgressError.__name__


def _is_starting(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the error comes from a server that is starting, or knows no leader yet."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    reason = from_rpc_error(error)
    if isinstance(reason, StandbyError):
        return not reason.leader  # the caller must know about a leader elsewhere
    return any(phrase in (error.details() or "") for phrase in _CLOSED)


# ---- Forks ----
#
# gRPC's threads do not exist in a fork of a process with an open client, so every call there
# would never end. Such calls get an error at once, and do not disturb the parent process.

_open: Final[WeakSet[object]] = WeakSet()
"""The open connections of this process."""
_parent: int | None = None
"""The id of the process from which this one was forked with open connections; None otherwise."""


def is_lost() -> bool:
    """Return whether this process cannot use clients, because it was forked while one was open."""
    return _parent is not None


def check_fork() -> None:
    """Raise WrongStateError if this process cannot use clients; see `is_lost`."""
    if is_lost():
        raise WrongStateError(
            f"this process is a fork of process {_parent}, in which a client of Stratagem was open,"
            " and gRPC does not work in such a fork: fork before a client is opened, or start "
            "processes with multiprocessing's spawn or forkserver"
        )


def _in_child() -> None:
    global _parent
    if _open:
        _parent = os.getppid()
        _open.clear()


os.register_at_fork(after_in_child=_in_child)

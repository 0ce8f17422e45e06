"""Serve PeerService: the incoming streams of other members.

The module keeps the groups of this process, and routes messages by (run, party, membership, source,
step, tag) into the mailbox of the group. The sending side is `mesh/grpc.py`. Streams are served on
the event loop; groups are joined and left from any thread.

A stream begins with a header without tensors, which names the sender before there is anything to
send, so that the end of the stream tells which member has left.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    PermissionDeniedError,
    StaleError,
    StratagemError,
    UnavailableError,
)
from stratagem.common.identity.callers import Caller, Names
from stratagem.common.rpc.channel import PLAINTEXT, Proof
from stratagem.common.rpc.server import checks_what_is_named
from stratagem.common.rpc.tensor_transfer import receive_header
from stratagem.common.tensors.manifest import Limits, from_proto
from stratagem.v1 import peer_pb2, peer_pb2_grpc
from stratagem.worker.mesh.mailbox import MAX_EARLY_BYTES, Mailbox, Route

HELLO_TIMEOUT_S: Final = 10.0
MAX_MEMBERSHIPS: Final = 16_384
_LIMITS: Final = Limits(max_tensors=1, max_total_bytes=2**31, max_tensor_bytes=2**31)


@dataclass(frozen=True, slots=True)
class Group:
    """A party's members under one membership, and this member's rank."""

    run_id: str
    party: str
    term: int
    membership: int
    rank: int
    size: int
    worker_ids: tuple[str, ...] = ()
    """The workers that the coordinator has made members, by rank; empty without certificates."""

    @property
    def key(self) -> tuple[str, str, int]:
        """A key that includes the rank, since several members of a party may be in one process."""
        return (self.run_id, self.party, self.rank)

    def check_sender(self, source: int, caller: Caller) -> None:
        """Raise unless the calling worker is the member that it claims to be."""
        if not caller.is_one_of(self.worker_ids[source : source + 1]):
            where = f"{self.run_id}/{self.party}".rstrip("/")
            raise PermissionDeniedError(f"{caller.name} is not member {source} of {where}")


class Endpoint:
    """A member in this process as others reach it; streams and was_cut are the event loop's."""

    def __init__(self, group: Group, max_early_bytes: int) -> None:
        self.group = group
        self.box = Mailbox(max_early_bytes)
        self.streams: set[_Inbound] = set()
        self.was_cut = False

    def interrupt(self) -> None:
        for stream in self.streams:
            stream.interrupt()


class PeerHub:
    """All endpoints of this process. Made on the event loop; used from any thread."""

    def __init__(
        self, address: str, proof: Proof = PLAINTEXT, *, max_early_bytes: int = MAX_EARLY_BYTES
    ) -> None:
        self.address = address
        """HOST:PORT at which other members reach this process."""
        self.proof = proof
        """The proof of identity for calls to other members."""
        self.loop = asyncio.get_running_loop()
        self._max_early_bytes = max_early_bytes
        self._lock = threading.Lock()
        self._endpoints: dict[tuple[str, str, int], Endpoint] = {}
        self._memberships: OrderedDict[tuple[str, str, int], int] = OrderedDict()
        """The highest membership joined per member of a party; the oldest entries are dropped."""
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, group: Group) -> Endpoint:
        """Accept streams for this group from now on, and none of the member's older groups."""
        with self._lock:
            newest = self._memberships.get(group.key, 0)
            if group.membership < newest:
                raise StaleError(f"membership {group.membership} is older than {newest}")
            old = self._endpoints.get(group.key)
            endpoint = Endpoint(group, self._max_early_bytes)
            self._endpoints[group.key] = endpoint
            self._memberships[group.key] = group.membership
            self._memberships.move_to_end(group.key)
            if len(self._memberships) > MAX_MEMBERSHIPS:
                self._memberships.popitem(last=False)
        if old is not None:
            self.end(old, "another membership was joined", cut=True)
        return endpoint

    def leave(self, endpoint: Endpoint) -> None:
        """Accept no further streams for this endpoint."""
        with self._lock:
            if self._endpoints.get(endpoint.group.key) is endpoint:
                del self._endpoints[endpoint.group.key]

    def find(self, header: peer_pb2.PeerHeader) -> Endpoint:
        """Return the endpoint that a header names; raise if the sender is not in its membership."""
        key = (header.run_id, header.party, header.destination)
        with self._lock:
            newest = self._memberships.get(key, 0)
            endpoint = self._endpoints.get(key)
        where = f"member {header.destination} of {header.run_id}/{header.party}".rstrip("/")
        membership = header.fence.membership
        if membership < newest:
            raise StaleError(f"membership {membership} of {where} is older than {newest}")
        if endpoint is None or membership > newest:
            raise UnavailableError(f"{where} is not here under membership {membership}")
        if header.source >= endpoint.group.size or header.source == endpoint.group.rank:
            raise InvalidInputError.at("header.source", f"{header.source} is no other member")
        return endpoint

    def end(self, endpoint: Endpoint, reason: str, *, cut: bool) -> None:
        """End the mailbox at once, and the streams into it soon."""
        endpoint.box.end(reason)

        def end_streams() -> None:
            endpoint.was_cut = endpoint.was_cut or cut
            endpoint.interrupt()

        self.call(end_streams)

    def call(self, function: Callable[[], object]) -> None:
        """Run a function on the event loop, unless the loop has ended."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task, which ends with this hub. Must be called on the event loop."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Cut all endpoints and wait for the end of their streams."""
        with self._lock:
            endpoints = list(self._endpoints.values())
        for endpoint in endpoints:
            self.end(endpoint, "the worker is stopping", cut=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _own_rank(servicer: Any, request: peer_pb2.SendRequest, caller: Caller) -> None:
    """Check that all headers name the same member, and that the caller may be that member."""
    if not caller.is_known or request.WhichOneof("message") != "header":
        return
    hello = request.header
    servicer.hub.find(hello).group.check_sender(hello.source, caller)


@checks_what_is_named(
    peer_pb2.DESCRIPTOR.services_by_name["PeerService"], {Names.OWN_RANK: _own_rank}
)
class PeerServicer(peer_pb2_grpc.PeerServiceServicer):
    """gRPC service that receives other members' streams into the mailboxes."""

    def __init__(self, hub: PeerHub, hello_timeout_s: float = HELLO_TIMEOUT_S) -> None:
        self.hub, self._hello_timeout_s = hub, hello_timeout_s

    async def Send(
        self, request_iterator: AsyncIterator[peer_pb2.SendRequest], context: Any
    ) -> AsyncIterator[peer_pb2.SendResponse]:
        hello = (await receive_header(request_iterator, self._hello_timeout_s)).header
        endpoint = self.hub.find(hello)
        stream = _Inbound(endpoint, request_iterator, hello)
        reason = f"member {hello.source} has left"
        endpoint.box.enter(hello.source)
        endpoint.streams.add(stream)
        try:
            header: peer_pb2.PeerHeader | None = hello
            num_messages = 0
            while header is not None:
                num_messages += await stream.take(header)
                yield peer_pb2.SendResponse(num_messages=num_messages)
                header = await stream.next_header()
        except StratagemError as error:
            reason = f"stream of member {hello.source}: {error}"
            raise
        finally:
            endpoint.streams.discard(stream)
            endpoint.box.leave(hello.source, reason)


class _Inbound:
    """Receives one stream of messages from another member."""

    def __init__(
        self,
        endpoint: Endpoint,
        requests: AsyncIterator[peer_pb2.SendRequest],
        hello: peer_pb2.PeerHeader,
    ) -> None:
        self._endpoint, self._requests, self._hello = endpoint, requests, hello
        self._guard: asyncio.Timeout | None = None

    def interrupt(self) -> None:
        """Stop waiting for the next request."""
        if self._guard is not None and not self._guard.expired():
            self._guard.reschedule(asyncio.get_running_loop().time())

    async def take(self, header: peer_pb2.PeerHeader) -> int:
        """Receive the message of a header into the mailbox; return the number of messages."""
        self._check(header)
        manifest = from_proto(header.manifest, _LIMITS)
        if not manifest.tensors:
            return 0
        route = Route(header.source, header.step, header.tag)
        writer, complete = self._endpoint.box.begin(route, manifest.tensors[0])
        try:
            while not writer.is_complete:
                request = await self._next()
                if request is None or request.WhichOneof("message") != "chunk":
                    raise IntegrityError(f"{route} ended after {writer.received} bytes")
                writer.write(request.chunk)
            complete()
        finally:
            self._endpoint.box.abandon(route)  # unless it is complete
        return 1

    async def next_header(self) -> peer_pb2.PeerHeader | None:
        """Return the header of the next message; None at the end."""
        request = await self._next()
        if request is None:
            return None
        if request.WhichOneof("message") != "header":
            raise InvalidInputError.at("message", "a message must begin with its header")
        return request.header

    def _check(self, header: peer_pb2.PeerHeader) -> None:
        for name in ("run_id", "party", "source", "destination"):
            if getattr(header, name) != getattr(self._hello, name):
                raise InvalidInputError.at(f"header.{name}", "changed inside a stream")
        if header.fence.membership != self._hello.fence.membership:
            raise InvalidInputError.at("header.fence.membership", "changed inside a stream")

    async def _next(self) -> peer_pb2.SendRequest | None:
        """Return the next request; None at the end, or if this member has closed its link."""
        box = self._endpoint.box
        try:
            async with asyncio.timeout(0 if box.reason else None) as self._guard:
                return await anext(self._requests, None)
        except TimeoutError:
            if self._endpoint.was_cut:
                raise UnavailableError(f"the receiver left the party: {box.reason}") from None
            return None
        finally:
            self._guard = None

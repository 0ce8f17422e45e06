"""The coordinator's connections to workers: one link per process of a worker, for all calls to it.

A link owns a channel and turns status codes into errors of common/base/errors.py. Nothing else in
the coordinator dials a worker. A tunnelled worker is dialled through the hub of its streams, which
is invisible to callers.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from stratagem.common.base.errors import UnavailableError
from stratagem.common.base.ids import RunId
from stratagem.common.base.text import is_loopback
from stratagem.common.rpc.channel import PLAINTEXT, DelegatingChannel, Proof, open_channel
from stratagem.common.rpc.probe import explain
from stratagem.common.rpc.status_codes import from_rpc_error, shown
from stratagem.common.tensors.files import FileSource
from stratagem.common.tensors.local_files import Near, Take, place
from stratagem.common.tensors.stream import frame
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.runtime.relay import RelayHub
from stratagem.v1 import tensor_pb2, types_pb2, worker_pb2, worker_pb2_grpc

# ---- Links ----

PROBE_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 5.0
_MAX_TROUBLE_BYTES = 200


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """A session of a party on a worker, as of one membership: the address of session calls."""

    member: Member
    run_id: RunId
    party: str
    membership: int

    @property
    def ref(self) -> types_pb2.SessionRef:
        """Return the message that identifies the session to the worker."""
        return session(self.run_id, self.party)


@dataclass(frozen=True, slots=True)
class SnapshotCalls:
    """Makes GetState calls for one snapshot, each from an offset on."""

    link: "WorkerLink"
    request: worker_pb2.GetStateRequest
    """The request, to which each call adds its offset and, if near, this process's place."""

    def __call__(self, offset: int) -> grpc.aio.UnaryStreamCall[Any, Any]:
        """Begin to receive the snapshot from a byte offset on."""
        return self._call(offset, "")

    def near(self, take: Take) -> Near | None:
        """Return the means to read the snapshot from a local file of the worker; None if the worker
        is on another machine."""
        if not self.link.place:
            return None
        return Near(lambda: self._call(0, self.link.place), take, self.link.leave)

    def _call(self, offset: int, place: str) -> grpc.aio.UnaryStreamCall[Any, Any]:
        # Each call gets a new message, because gRPC reads it later, in a task.
        request = worker_pb2.GetStateRequest(offset=offset, place=place)
        request.MergeFrom(self.request)
        return self.link.stub.GetState(request)


class WorkerLink:
    def __init__(
        self, member: Member, address: str, term: int, proof: Proof, relay: RelayHub
    ) -> None:
        """Open the channel; address: host:port of the worker, or "" to use its tunnel."""
        self.member = member
        self.address = address
        self.is_near = is_loopback(address.rpartition(":")[0])
        """True if the worker is on this machine, so that it may read files that are open here."""
        self._proof = proof
        self._term = term
        self._relay = relay
        target = address or relay.target(member)
        self._channel = open_channel(target, proof, is_shallow=True, to_worker=member.worker_id)
        if not address:
            self._channel = _TunnelChannel(self._channel, lambda: relay.check_open(member))
        self.stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    def leave(self) -> None:
        """Stop sharing files with the worker, since that does not work on this machine."""
        self.is_near = False

    @property
    def place(self) -> str:
        """Return this process's place (local_files.py), so that a near worker may offer files."""
        return place() if self.is_near else ""

    def fence(self, membership: int) -> types_pb2.Fence:
        """Return the fence, by which workers refuse outdated calls: leadership term, membership."""
        return types_pb2.Fence(term=self._term, membership=membership)

    async def execute(
        self, request: worker_pb2.ExecuteRequest
    ) -> AsyncGenerator[worker_pb2.ExecuteResponse, None]:
        """Execute a plan, and yield the worker's messages. Raises UnavailableError if it breaks."""
        call = self.stub.Execute(request)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        raise UnavailableError(f"worker {self.member.worker_id} ended the stream early")

    async def answers(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Return True if exactly this process of the worker answers at its address."""
        return not await self.trouble(timeout_s)

    async def trouble(self, timeout_s: float) -> str:
        """Return why this worker process does not answer, in gRPC's words; "" if it answers."""
        try:
            described = await self.stub.Describe(worker_pb2.DescribeRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return _how_silent(error, timeout_s)
        except UnavailableError as error:
            return str(error)
        is_same = described.incarnation == self.member.incarnation
        return "" if is_same else "another worker process answers there"

    async def why_silent(self) -> str:
        """Return why a worker is silent if its identity or tunnel is the reason; otherwise ""."""
        if not self.address:
            return self._relay.silence(self.member)
        proof, name = self._proof, self.member.worker_id
        return await asyncio.to_thread(explain, self.address, proof, name)

    async def close_session(
        self, run_id: RunId, session: types_pb2.SessionRef | None = None
    ) -> None:
        """Have the worker forget a session of a run, or, without a session, the whole run with its
        blobs. Raises if the worker does not answer."""
        fence = self.fence(0)
        request = worker_pb2.CloseSessionRequest(fence=fence, run_id=run_id, session=session)
        await _answered(self.stub.CloseSession(request, timeout=CLOSE_TIMEOUT_S))

    async def abort(self, at: WorkerSession) -> None:
        """Have the worker abort the work in a session."""
        request = worker_pb2.AbortRequest(
            fence=self.fence(at.membership), session=at.ref, reason="no longer needed"
        )
        await _answered(self.stub.Abort(request, timeout=CLOSE_TIMEOUT_S))

    def snapshot(
        self, at: WorkerSession, number: int, base: str = "", *, of_mirror: bool = False
    ) -> "SnapshotCalls":
        """Return the calls that pull a snapshot of a session. base: the name of a snapshot whose
        bytes are stored here. of_mirror: pull the mirror of the previous member's snapshot
        instead."""
        request = worker_pb2.GetStateRequest(
            fence=self.fence(at.membership),
            session=at.ref,
            snapshot=number,
            base=base,
            of_mirror=of_mirror,
        )
        return SnapshotCalls(self, request)

    def outputs(
        self, at: WorkerSession, number: int
    ) -> Callable[[int], grpc.aio.UnaryStreamCall[Any, Any]]:
        """Return a function that requests, from an offset on, the outputs that a session kept at
        the end of a segment."""
        return self._request_from(at, outputs=number)

    def kept(
        self, at: WorkerSession, number: int
    ) -> Callable[[int], grpc.aio.UnaryStreamCall[Any, Any]]:
        """Return a function that requests, from an offset on, the parts that only this member had
        at the end of a segment."""
        return self._request_from(at, kept=number)

    def _request_from(
        self, at: WorkerSession, **number: int
    ) -> Callable[[int], grpc.aio.UnaryStreamCall[Any, Any]]:
        def request(offset: int) -> grpc.aio.UnaryStreamCall[Any, Any]:
            fence = self.fence(at.membership)
            wanted = worker_pb2.GetStateRequest(fence=fence, session=at.ref, offset=offset)
            wanted.MergeFrom(worker_pb2.GetStateRequest(**number))  # type: ignore[arg-type]
            return self.stub.GetState(wanted)

        return request

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class Links:
    """The open links, one per member."""

    def __init__(self, term: int, relay: RelayHub, proof: Proof = PLAINTEXT) -> None:
        self._term = term
        self._proof = proof
        self._relay = relay
        self._links: dict[Member, WorkerLink] = {}

    def to(self, member: Member, state: CoordinatorState) -> WorkerLink:
        """Return the link to a member. Raises UnavailableError if its process is gone."""
        if not is_alive(member, state):
            raise UnavailableError(f"worker {member.worker_id} is lost")
        record = state.workers[member.worker_id]
        link = self._links.get(member)
        if link is None or link.address != record.address:
            link = self._links[member] = self.open(member, record.address)
        return link

    def open(self, member: Member, address: str) -> WorkerLink:
        """Open a separate link to a worker that may not be registered yet; the caller closes it."""
        return WorkerLink(member, address, self._term, self._proof, self._relay)

    def drop_lost(self, state: CoordinatorState) -> list[WorkerLink]:
        """Remove and return the links to members that are gone, for the caller to close."""
        lost = [member for member in self._links if not is_alive(member, state)]
        return [self._links.pop(member) for member in lost]

    async def close(self) -> None:
        """Close all channels."""
        for link in self._links.values():
            await link.close()
        self._links.clear()


def is_alive(member: Member, state: CoordinatorState) -> bool:
    """Return True if this process of a worker is registered, and not known to be lost."""
    record = state.workers.get(member.worker_id)
    return record is not None and record.member == member and record.is_alive


class _TunnelChannel(DelegatingChannel):
    """A channel whose calls raise UnavailableError at once while the worker has no open tunnel:
    gRPC would only report a closed socket."""

    def __init__(self, inner: grpc.aio.Channel, check_open: Callable[[], None]) -> None:
        self._inner, self._check_open = inner, check_open

    def _present(self) -> grpc.aio.Channel:
        return self._inner

    def _calls(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = getattr(self._inner, kind)(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._check_open()
            return inner(*args, **kwargs)

        return call


def _how_silent(error: grpc.aio.AioRpcError, timeout_s: float) -> str:
    """Return the useful part of gRPC's error text about a failed call."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {timeout_s:g} s"
    details = error.details() or error.code().name
    if "resolv" in details or "lookup" in details:
        return "its host name cannot be resolved here"
    if "Connection refused" in details:
        return "connection refused"
    return shown(details, _MAX_TROUBLE_BYTES)


async def _answered(call: Awaitable[object]) -> None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def session(run_id: RunId, party: str) -> types_pb2.SessionRef:
    """Return the message that identifies a party's session on a worker."""
    return types_pb2.SessionRef(run_id=run_id, party=party)


def state_ref(base: Base) -> worker_pb2.StateRef:
    """Return a committed state as a protobuf message."""
    return worker_pb2.StateRef(
        segment=base.segment, step=base.step, digest=base.digest, streams=base.streams
    )


# ---- Shared chunks ----
#
# Several receivers that read one file at about the same time share its chunks.
#
# A chunk is read, checksummed and framed once. The newest ones are kept, so a receiver that is
# slightly behind finds them ready, and one that is far behind reads them again. Memory is a few
# chunks, whatever the size of the file and the number of receivers. This runs on the event loop.

NUM_KEPT: Final = 4


class SharedFrames:
    """The frames of a file range of total_bytes, shared by receivers that read them at about the
    same time."""

    def __init__(
        self,
        source: FileSource,
        total_bytes: int,
        check: Callable[[int, bytes], None],
        offer: Callable[[], tensor_pb2.OpenFile | None],
    ) -> None:
        """Take the range to share. check: called with the offset and bytes of each new frame.
        offer: returns the open file for receivers that read the file themselves."""
        self.offer = offer
        self._source = source
        self._check = check
        self._total_bytes = total_bytes
        self._frames: OrderedDict[int, tuple[bytes, int]] = OrderedDict()  # (frame, bytes of data)

    def __call__(self, offset: int) -> Iterator[bytes]:
        """Yield the frames of the file range from a byte offset on."""
        pieces: Iterator[bytes] | None = None  # stands at the offset, or is not open
        while offset < self._total_bytes:
            made = self._frames.get(offset)
            if made is None:
                if pieces is None:
                    pieces = self._source(offset)
                made = self._keep(offset, next(pieces))
            else:
                pieces = None
            yield made[0]
            offset += made[1]

    def _keep(self, offset: int, piece: bytes) -> tuple[bytes, int]:
        made = frame(offset, piece)
        self._check(offset, made)
        self._frames[offset] = made, len(piece)
        if len(self._frames) > NUM_KEPT:
            self._frames.popitem(last=False)
        return self._frames[offset]

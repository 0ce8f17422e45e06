"""The gRPC engine: links that need no separate port, and the only ones that TLS can protect.

This is the sending side: one stream to each other member, kept for the life of the link, with its
messages in order. `peers.py` serves the incoming streams. Streams run on the event loop; a link is
used from any other thread. The engine knows nothing of gradients.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from torch import Tensor

from stratagem.common.base.errors import StratagemError
from stratagem.common.rpc.channel import Proof, open_channel, write_message
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.common.tensors.manifest import Purpose, build_manifest, to_proto
from stratagem.common.tensors.stream import from_buffers, iter_frames, sent
from stratagem.common.tensors.torch_codec import bytes_of, dtype_of
from stratagem.v1 import peer_pb2, peer_pb2_grpc, tensor_pb2, types_pb2
from stratagem.worker.mesh.link import LEAVE_BYTES_PER_S, LEAVE_GRACE_S, ExchangeError, Rendezvous
from stratagem.worker.mesh.mailbox import Mailbox, Receive, Route
from stratagem.worker.mesh.peers import Endpoint, Group, PeerHub
from stratagem.worker.mesh.staging import HostCopy, to_host

LEAVE_TIMEOUT_S: Final = 5.0
WINDOW_BYTES: Final = 16 * 2**20
"""Maximum number of sent bytes that the receiver has not acknowledged."""


def form_grpc(hub: PeerHub, group: Group, rendezvous: Rendezvous, timeout_s: float) -> GrpcLink:
    """Join the group by gRPC; block until this member has a stream to each other one.

    rendezvous: sends this process's address and returns all addresses, by rank; its errors are
    passed on. Must not be called on the event loop.
    """
    endpoint = hub.join(group)
    try:
        answers = rendezvous(hub.address.encode())
    except BaseException:
        leave_grpc(hub, endpoint)
        raise
    return connect_grpc(hub, endpoint, answers, timeout_s)


def connect_grpc(
    hub: PeerHub, endpoint: Endpoint, answers: Sequence[bytes], timeout_s: float
) -> GrpcLink:
    """Return the link of an endpoint that was opened before the rendezvous. answers: by rank."""
    try:
        if len(answers) != endpoint.group.size:
            raise ExchangeError(
                f"rendezvous gave {len(answers)} addresses, not {endpoint.group.size}"
            )
        addresses = [answer.decode() for answer in answers]
        forming = _connected(hub, endpoint, addresses, timeout_s)
        return asyncio.run_coroutine_threadsafe(forming, hub.loop).result()
    except BaseException:
        leave_grpc(hub, endpoint)
        raise


def leave_grpc(hub: PeerHub, endpoint: Endpoint) -> None:
    """Close an endpoint whose link is not formed after all."""
    hub.end(endpoint, "the link was not formed", cut=True)
    hub.leave(endpoint)


async def _connected(
    hub: PeerHub, endpoint: Endpoint, addresses: list[str], timeout_s: float
) -> GrpcLink:
    """Return the link once all its streams are open. Raises ExchangeError."""
    link = GrpcLink(hub, endpoint, addresses)
    try:
        async with asyncio.timeout(timeout_s):
            await link.connected()
    except TimeoutError:
        link.cut()
        raise ExchangeError(f"no answer within {timeout_s:g} s while connecting") from None
    except BaseException:
        link.cut()
        raise
    return link


class GrpcLink:
    """A `Link` with one gRPC stream to, and one from, each other member. Made on the event loop."""

    name = "grpc"
    in_order = False

    def __init__(self, hub: PeerHub, endpoint: Endpoint, addresses: list[str]) -> None:
        self.rank, self.size = endpoint.group.rank, endpoint.group.size
        self._hub, self._endpoint = hub, endpoint
        self._out = {
            peer: _Outbound(endpoint.group, peer, Door(address, hub.proof), endpoint.box)
            for peer, address in enumerate(addresses)
            if peer != self.rank
        }
        self._latest: weakref.ref[GrpcTransfer] | None = None
        self._is_closed = False
        self._task = hub.spawn(self._run())

    async def connected(self) -> None:
        """Wait until each other member has answered. Raises ExchangeError."""
        await asyncio.gather(*(peer.connected for peer in self._out.values()))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for out in self._out.values():
                tasks.create_task(self._hold(out))

    async def _hold(self, out: _Outbound) -> None:
        """Run the stream to one member; after its end, cut the link unless all receives complete
        soon.

        Without this member no exchange can complete, but messages of others may still arrive. A
        receive that stays open may depend on a member that itself waits for the lost one.
        """
        await out.run()
        box = self._endpoint.box
        await asyncio.sleep(LEAVE_GRACE_S + box.num_open_bytes / LEAVE_BYTES_PER_S)
        if box.num_open_bytes and not self._is_closed:
            self.cut()

    def send(self, peer: int, tag: int, tensor: Tensor, step: int = 0) -> GrpcTransfer:
        out = self._out[peer]
        work = GrpcTransfer(out, tag, tensor, step, self._copy_of(tensor))
        self._latest = weakref.ref(work)
        self._hub.call(lambda: out.queue.put_nowait(work))
        return work

    def _copy_of(self, tensor: Tensor) -> HostCopy:
        """Return the tensor on the host. Consecutive sends of the same tensor share one copy."""
        latest = self._latest() if self._latest is not None else None
        if latest is not None and latest.tensor is tensor and not latest.is_done:
            return latest.copy
        return to_host(tensor)

    def recv(self, peer: int, tag: int, tensor: Tensor) -> Receive:
        return self._endpoint.box.post(Route(peer, 0, tag), tensor)

    def open_step(self, step: int, awaited: Iterable[tuple[int, int]]) -> None:
        """Open a step: from now on accept each of these messages, (source, tag), once, and none of
        older steps. For messages whose size the receiver does not know."""
        self._endpoint.box.open_step(step, [Route(peer, step, tag) for peer, tag in awaited])

    def take(self, peer: int, step: int, tag: int, timeout_s: float) -> memoryview:
        """Return the bytes of one message, which belong to the caller. Raises ExchangeError."""
        return self._endpoint.box.take(Route(peer, step, tag), timeout_s)

    def cut(self) -> None:
        self._hub.end(self._endpoint, "the link was cut", cut=True)
        self._hub.call(self._task.cancel)

    def close(self) -> None:
        self._is_closed = True
        self._hub.end(self._endpoint, "the link is closed", cut=False)
        self._hub.leave(self._endpoint)
        self._hub.call(self._leave)

    def _leave(self) -> None:
        for out in self._out.values():
            out.queue.put_nowait(None)


class GrpcTransfer:
    """A send in progress. `is_done` is guarded by the mailbox's condition."""

    __slots__ = ("__weakref__", "_out", "copy", "is_done", "size_bytes", "step", "tag", "tensor")

    def __init__(self, out: _Outbound, tag: int, tensor: Tensor, step: int, copy: HostCopy) -> None:
        """Begin the send. copy: the tensor on the host, or on its way there."""
        self._out, self.tag, self.step = out, tag, step
        self.tensor, self.copy = tensor, copy
        self.size_bytes = tensor.nbytes
        self.is_done = False

    def wait(self, timeout_s: float) -> None:
        """Wait until the tensor may be changed. Raises ExchangeError."""
        self._out.wait(self, timeout_s)


@dataclass(frozen=True, slots=True)
class Door:
    """Another member's address, and the proof of identity for calling it."""

    address: str
    proof: Proof

    def open(self) -> grpc.aio.Channel:
        return open_channel(self.address, self.proof, own_connection=True, to_worker="")


class _Outbound:
    """The stream to one other member. Used on the event loop, except `wait`."""

    def __init__(self, group: Group, peer: int, door: Door, box: Mailbox) -> None:
        self._group, self._peer, self._door, self._box = group, peer, door, box
        self.queue: asyncio.Queue[GrpcTransfer | None] = asyncio.Queue()
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unanswered: deque[int] = deque()
        """Sizes of the messages that the receiver has not acknowledged."""
        self._num_answered = 0
        self._room = asyncio.Event()
        self._end = ""  # guarded by the box's condition

    def wait(self, work: GrpcTransfer, timeout_s: float) -> None:
        with self._box.changed:
            self._box.changed.wait_for(
                lambda: work.is_done or self._end or self._box.reason, timeout_s
            )
            if not work.is_done:
                reason = self._box.reason or self._end or f"not taken within {timeout_s:g} s"
                raise ExchangeError(f"send to member {self._peer}: {reason}")

    async def run(self) -> None:
        """Run the stream until the link ends or the peer is gone; raises for neither."""
        reason = f"member {self._peer} has ended the stream"
        try:
            async with self._door.open() as channel:
                await self._talk(peer_pb2_grpc.PeerServiceStub(channel).Send())
        except (grpc.aio.AioRpcError, StratagemError) as error:
            reason = str(from_rpc_error(error) if isinstance(error, grpc.RpcError) else error)
        finally:
            self._give_up(reason)

    async def _talk(self, call: Any) -> None:
        await call.wait_for_connection()
        await write_message(call, self._header(0, 0, None))
        if await call.read() is grpc.aio.EOF:
            return
        self.connected.set_result(None)
        answers = asyncio.create_task(self._read_answers(call))
        writes = asyncio.create_task(self._write_messages(call))
        try:
            await asyncio.wait((answers, writes), return_when=asyncio.FIRST_COMPLETED)
            if writes.done() and not writes.exception():  # all is sent: wait for its arrival
                await asyncio.wait((answers,), timeout=LEAVE_TIMEOUT_S)
        finally:
            answers.cancel()
            writes.cancel()
            results = await asyncio.gather(answers, writes, return_exceptions=True)
            call.cancel()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _read_answers(self, call: Any) -> None:
        while (answer := await call.read()) is not grpc.aio.EOF:
            while self._num_answered < answer.num_messages and self._unanswered:
                self._unanswered.popleft()
                self._num_answered += 1
            self._room.set()

    async def _write_messages(self, call: Any) -> None:
        while (work := await self.queue.get()) is not None:
            while self._unanswered and sum(self._unanswered) + work.size_bytes > WINDOW_BYTES:
                self._room.clear()
                await self._room.wait()
            self._unanswered.append(work.size_bytes)
            tensor = await work.copy.arrive()
            await write_message(call, self._header(work.step, work.tag, tensor))
            pieces = from_buffers([bytes_of(tensor)])(0)
            for frame in iter_frames(pieces):
                await write_message(call, frame)
            sent(Purpose.MESH).num_bytes += work.size_bytes
            with self._box.changed:
                work.is_done = True
                self._box.changed.notify_all()
        await call.done_writing()

    def _header(self, step: int, tag: int, tensor: Tensor | None) -> peer_pb2.SendRequest:
        group = self._group
        return peer_pb2.SendRequest(
            header=peer_pb2.PeerHeader(
                fence=types_pb2.Fence(term=group.term, membership=group.membership),
                run_id=group.run_id,
                party=group.party,
                source=group.rank,
                destination=self._peer,
                step=step,
                tag=tag,
                manifest=_manifest(tensor),
            )
        )

    def _give_up(self, reason: str) -> None:
        with self._box.changed:
            self._end = reason
            self._box.changed.notify_all()
        self._box.lose(self._peer, reason)
        if not self.connected.done():
            self.connected.set_exception(ExchangeError(f"member {self._peer}: {reason}"))
            self.connected.exception()  # one of them is enough for the waiting tasks


def _manifest(tensor: Tensor | None) -> tensor_pb2.Manifest:
    """Return the manifest of one flat tensor; empty for the header that names the sender."""
    named = [] if tensor is None else [("data", dtype_of(tensor), (tensor.numel(),))]
    return to_proto(build_manifest(named, Purpose.MESH))

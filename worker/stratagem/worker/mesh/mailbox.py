"""Mailboxes, one per membership of a party, that receive the other members' messages.

A mailbox keeps the early messages, the posted receives, and the members that are gone. Messages of
gRPC come in on the event loop, receives are posted and awaited in other threads; one condition
guards all. A message whose receive is posted goes straight into its tensor; early ones are kept, up
to a limit. The module must not import gRPC.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, LimitError, UnavailableError
from stratagem.common.tensors.manifest import Purpose, TensorSpec
from stratagem.common.tensors.stream import ChunkWriter, Data
from stratagem.common.tensors.torch_codec import bytes_of, dtype_of
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.staging import host_room

MAX_EARLY_BYTES: Final = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Route:
    """The key of a message inside a mailbox."""

    source: int
    step: int
    tag: int

    def __str__(self) -> str:
        return f"tag {self.tag} of step {self.step} from member {self.source}"


class Receive:
    """A posted receive. `is_done` is guarded by the mailbox's lock."""

    __slots__ = ("_box", "_stage", "_tensor", "dtype", "is_done", "route", "size_bytes", "view")

    def __init__(self, box: "Mailbox", route: Route, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self._box, self.route, self._tensor = box, route, tensor
        # A tensor of another device is filled from this buffer at the end of the wait.
        self._stage = (
            tensor if tensor.is_cpu else host_room(tensor.shape, tensor.dtype, tensor.device)
        )
        self.view = bytes_of(self._stage)
        self.size_bytes = tensor.nbytes
        self.dtype = dtype_of(tensor)
        self.is_done = False

    def wait(self, timeout_s: float) -> None:
        """Wait until the tensor is filled. Raises ExchangeError."""
        self._box.wait(self, timeout_s)
        if self._stage is not self._tensor:
            self._tensor.copy_(self._stage)


class _Message:
    """A message that is arriving, or that has arrived before its receive was posted."""

    __slots__ = ("buffer", "is_complete", "receive", "size_bytes", "spec")

    def __init__(self, spec: TensorSpec, receive: Receive | None) -> None:
        self.spec, self.size_bytes = spec, spec.size_bytes
        self.receive = receive
        self.buffer = receive.view if receive else _room(spec.size_bytes)
        self.is_complete = False


class Mailbox:
    """Receives all messages of other members to this member under one membership."""

    def __init__(self, max_early_bytes: int = MAX_EARLY_BYTES) -> None:
        self.changed: Final = threading.Condition()
        self._max_early_bytes = max_early_bytes
        # All below is guarded by `changed`.
        self._posted: dict[Route, Receive] = {}
        self._messages: dict[Route, _Message] = {}
        """Messages that are arriving, or complete but not yet copied to their tensors."""
        self._early_bytes = 0
        self._early: set[Route] = set()
        """Routes of messages that arrived early, before their receives were posted."""
        self._first_step = 0
        self._awaited: set[Route] | None = None
        """Messages of the oldest open step that are still missing; None while no step is open."""
        self._present: dict[int, int] = {}
        """Number of open streams per source."""
        self._gone: dict[int, str] = {}
        """The sources from which nothing more will come, with the reasons."""
        self._end = ""

    # ---- Receiving side, from any thread ----

    def post(self, route: Route, tensor: Tensor) -> Receive:
        """Post a receive of a message into a tensor; the message may have arrived already."""
        receive = Receive(self, route, tensor)
        with self.changed:
            self._refuse_when_over(route.source, route in self._messages)
            if route in self._posted:
                raise ExchangeError(f"{route} is waited for twice")
            message = self._messages.get(route)
            if message is None:
                self._posted[route] = receive
            elif message.receive is not None:
                raise ExchangeError(f"{route} is waited for twice")
            else:
                message.receive = receive
                if (receive.size_bytes, receive.dtype) != (message.size_bytes, message.spec.dtype):
                    raise ExchangeError(_mismatch(receive, message.spec))
                self._deliver(route, message)
        return receive

    def wait(self, receive: Receive, timeout_s: float) -> None:
        """Block until the receive is done. Raises ExchangeError at the timeout, or if the message
        cannot come any more."""
        with self.changed:
            self._await(receive.route, lambda: receive.is_done, timeout_s)

    def open_step(self, step: int, awaited: Iterable[Route]) -> None:
        """Open a step: from now on accept each of these messages once, and none of older steps.

        They are received with `take`, can have any size, and do not count as early.
        """
        with self.changed:
            self._first_step, self._awaited = step, set(awaited)
            for route in [route for route in self._messages if route.step <= step]:
                if route not in self._awaited:
                    raise ExchangeError(f"{route} is here, but not awaited")
                self._awaited.remove(route)
                self._unreserve(route)

    def take(self, route: Route, timeout_s: float) -> memoryview:
        """Block until a message of unknown size is complete; return its bytes."""
        with self.changed:
            self._await(route, lambda: self._is_here(route), timeout_s)
            self._unreserve(route)
            return self._messages.pop(route).buffer

    def has(self, route: Route) -> bool:
        """Return whether `take` would return at once: the message is complete, or cannot come."""
        with self.changed:
            return self._is_here(route) or bool(self._reason(route))

    def end(self, reason: str) -> None:
        """Make all present and later waits fail; no tensor is written afterwards."""
        with self.changed:
            self._end = self._end or reason
            self._posted.clear()
            self._messages.clear()
            self.changed.notify_all()

    @property
    def reason(self) -> str:
        """The reason why the mailbox has ended; "" until then."""
        return self._end

    @property
    def num_open_bytes(self) -> int:
        """Number of bytes that are still missing in open receives."""
        with self.changed:
            begun = [m.receive for m in self._messages.values() if m.receive is not None]
            return sum(receive.size_bytes for receive in (*self._posted.values(), *begun))

    # ---- Streams, on the event loop ----

    def enter(self, source: int) -> None:
        """Note that a stream from this member has opened."""
        with self.changed:
            self._present[source] = self._present.get(source, 0) + 1

    def leave(self, source: int, reason: str) -> None:
        """Note that a stream from this member has ended."""
        with self.changed:
            self._present[source] -= 1
        self.lose(source, reason)

    def lose(self, source: int, reason: str) -> None:
        """Note that nothing more comes from this member, unless it has an open stream."""
        with self.changed:
            if not self._present.get(source):
                self._gone.setdefault(source, reason)
                self.changed.notify_all()

    def begin(self, route: Route, spec: TensorSpec) -> tuple[ChunkWriter, Callable[[], None]]:
        """Begin a message: return a writer for its chunks, and a function to call at its end."""
        with self.changed:
            message = self._admit(route, spec)

        def write(offset: int, data: Data) -> None:
            with self.changed:  # after `end`, the tensor belongs to others again
                if self._end:
                    raise UnavailableError(f"the receiver has left the party: {self._end}")
                message.buffer[offset : offset + len(data)] = data

        def complete() -> None:
            with self.changed:
                self._complete(route, message)

        return ChunkWriter(spec.size_bytes, write, purpose=Purpose.MESH), complete

    def put(self, route: Route, data: memoryview) -> None:
        """Store a complete message; its bytes are copied."""
        spec = TensorSpec("data", "uint8", (len(data),), 0, len(data))
        with self.changed:
            message = self._admit(route, spec)
            message.buffer[:] = data
            self._complete(route, message)

    def abandon(self, route: Route) -> None:
        """Remove a message whose stream has broken."""
        with self.changed:
            message = self._messages.get(route)
            if message is None or message.is_complete:
                return
            self._unreserve(route)
            del self._messages[route]
            if message.receive is not None:
                self._posted[route] = message.receive
            if self._awaited is not None and route.step == self._first_step:
                self._awaited.add(route)

    # ---- Internal; the caller holds `changed` ----

    def _await(self, route: Route, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Block until is_done(). Raises ExchangeError at the timeout, or if no message of this
        route can come any more."""
        self.changed.wait_for(lambda: is_done() or self._reason(route), timeout_s)
        if not is_done():
            reason = self._reason(route) or f"nothing within {timeout_s:g} s"
            raise ExchangeError(f"receive of {route}: {reason}")

    def _is_here(self, route: Route) -> bool:
        message = self._messages.get(route)
        return message is not None and message.is_complete

    def _complete(self, route: Route, message: _Message) -> None:
        message.is_complete = True
        self._deliver(route, message)
        self.changed.notify_all()

    def _admit(self, route: Route, spec: TensorSpec) -> _Message:
        """Make room for a message, or raise if the message is not acceptable."""
        if self._end:
            raise UnavailableError(f"the receiver has left the party: {self._end}")
        if route in self._messages:
            raise InvalidInputError.at("header.tag", f"{route} is here already")
        receive = self._posted.get(route)
        if self._is_awaited(route):
            pass
        elif receive is None:
            self._reserve(route, spec.size_bytes)
        elif (receive.size_bytes, receive.dtype) != (spec.size_bytes, spec.dtype):
            raise InvalidInputError.at("header.manifest", _mismatch(receive, spec))
        self._posted.pop(route, None)
        message = self._messages[route] = _Message(spec, receive)
        return message

    def _is_awaited(self, route: Route) -> bool:
        """Return whether a message belongs to the open step; raise for a stale or repeated one."""
        if self._awaited is None or route.step > self._first_step:
            return False
        if route.step < self._first_step:
            text = f"{route} is stale, the receiver is at step {self._first_step}"
            raise InvalidInputError.at("header.step", text)
        if route not in self._awaited:
            raise InvalidInputError.at("header.tag", f"{route} is not awaited, or here twice")
        self._awaited.remove(route)
        return True

    def _reserve(self, route: Route, size_bytes: int) -> None:
        if self._early_bytes + size_bytes > self._max_early_bytes:
            raise LimitError(
                f"early messages: {self._early_bytes + size_bytes} bytes with {route}, "
                f"the limit is {self._max_early_bytes}"
            )
        self._early_bytes += size_bytes
        self._early.add(route)

    def _unreserve(self, route: Route) -> None:
        if route in self._early:
            self._early.remove(route)
            self._early_bytes -= self._messages[route].size_bytes

    def _deliver(self, route: Route, message: _Message) -> None:
        """Copy a complete message to its tensor, if the receive is posted."""
        receive = message.receive
        if receive is None or not message.is_complete or self._end:
            return
        if message.buffer is not receive.view:
            if message.size_bytes:
                receive.view[:] = message.buffer
            self._unreserve(route)
        del self._messages[route]
        receive.is_done = True

    def _reason(self, route: Route) -> str:
        if self._end:
            return self._end
        return "" if self._is_here(route) else self._gone.get(route.source, "")

    def _refuse_when_over(self, source: int, is_here: bool) -> None:
        reason = self._end or ("" if is_here else self._gone.get(source, ""))
        if reason:
            raise ExchangeError(f"receive from member {source}: {reason}")


def _mismatch(receive: Receive, spec: TensorSpec) -> str:
    return (
        f"{receive.route} has {spec.size_bytes} bytes of {spec.dtype}, "
        f"the receiver expects {receive.size_bytes} of {receive.dtype}"
    )


def _room(size_bytes: int) -> memoryview:
    """Return memory that is allocated only when written, as an announced message may never come."""
    return np.empty(size_bytes, np.uint8).data

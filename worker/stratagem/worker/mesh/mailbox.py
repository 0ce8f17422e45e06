"""Mailboxes, in which messages of fellow members arrive: one per membership of a party.

Owns what has arrived early, what is waited for, and which members are gone. Messages of gRPC come
in on the event loop, receives are posted and waited for in other threads; one condition guards all.
A message whose receive is posted goes straight into its tensor; an early one is kept, up to a
limit. Must not know gRPC.
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
    """Names one message inside a mailbox."""

    source: int
    step: int
    tag: int

    def __str__(self) -> str:
        return f"tag {self.tag} of step {self.step} from member {self.source}"


class Receive:
    """One posted receive. `is_done` is guarded by the mailbox."""

    __slots__ = ("_box", "_stage", "_tensor", "dtype", "is_done", "route", "size_bytes", "view")

    def __init__(self, box: "Mailbox", route: Route, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self._box, self.route, self._tensor = box, route, tensor
        # A tensor of another device is filled from here at the end of the wait.
        self._stage = (
            tensor if tensor.is_cpu else host_room(tensor.shape, tensor.dtype, tensor.device)
        )
        self.view = bytes_of(self._stage)
        self.size_bytes = tensor.nbytes
        self.dtype = dtype_of(tensor)
        self.is_done = False

    def wait(self, timeout_s: float) -> None:
        """Returns when the tensor is filled. Raises ExchangeError."""
        self._box.wait(self, timeout_s)
        if self._stage is not self._tensor:
            self._tensor.copy_(self._stage)


class _Message:
    """One message that arrives, or has arrived early."""

    __slots__ = ("buffer", "is_complete", "receive", "size_bytes", "spec")

    def __init__(self, spec: TensorSpec, receive: Receive | None) -> None:
        self.spec, self.size_bytes = spec, spec.size_bytes
        self.receive = receive
        self.buffer = receive.view if receive else _room(spec.size_bytes)
        self.is_complete = False


class Mailbox:
    """Receives everything that the other members send to this one under one membership."""

    def __init__(self, max_early_bytes: int = MAX_EARLY_BYTES) -> None:
        self.changed: Final = threading.Condition()
        self._max_early_bytes = max_early_bytes
        # All below is guarded by `changed`.
        self._posted: dict[Route, Receive] = {}
        self._messages: dict[Route, _Message] = {}
        """Under way, or early and complete; gone once they are in their tensor."""
        self._early_bytes = 0
        self._early: set[Route] = set()
        """Those messages that count as early."""
        self._first_step = 0
        self._awaited: set[Route] | None = None
        """What is still to come of the first step; None while steps are not opened."""
        self._present: dict[int, int] = {}
        """Open streams by source."""
        self._gone: dict[int, str] = {}
        """Sources from which nothing more will come, and why."""
        self._end = ""

    # ---- Receiving side, from any thread ----

    def post(self, route: Route, tensor: Tensor) -> Receive:
        """Posts a receive: the tensor that a message goes to, which may be here already."""
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
        """Blocks until the receive is done. Raises ExchangeError when it cannot be done any more,
        or is not in time."""
        with self.changed:
            self._await(receive.route, lambda: receive.is_done, timeout_s)

    def open_step(self, step: int, awaited: Iterable[Route]) -> None:
        """Opens a step: from now on takes these messages of it, each once, and none of an older
        one.

        They are taken with `take`, can have any size, and do not count as early.
        """
        with self.changed:
            self._first_step, self._awaited = step, set(awaited)
            for route in [route for route in self._messages if route.step <= step]:
                if route not in self._awaited:
                    raise ExchangeError(f"{route} is here, but not awaited")
                self._awaited.remove(route)
                self._unreserve(route)

    def take(self, route: Route, timeout_s: float) -> memoryview:
        """Blocks until a message of unknown size is here whole; its bytes are the caller's."""
        with self.changed:
            self._await(route, lambda: self._is_here(route), timeout_s)
            self._unreserve(route)
            return self._messages.pop(route).buffer

    def has(self, route: Route) -> bool:
        """Returns whether `take` would not have to wait: the message is here whole, or cannot
        come."""
        with self.changed:
            return self._is_here(route) or bool(self._reason(route))

    def end(self, reason: str) -> None:
        """Makes all waits fail, now and later; nothing is written into a tensor afterwards."""
        with self.changed:
            self._end = self._end or reason
            self._posted.clear()
            self._messages.clear()
            self.changed.notify_all()

    @property
    def reason(self) -> str:
        """The reason why it has ended; "" while it has not."""
        return self._end

    @property
    def num_open_bytes(self) -> int:
        """The number of bytes that are waited for and not here yet."""
        with self.changed:
            begun = [m.receive for m in self._messages.values() if m.receive is not None]
            return sum(receive.size_bytes for receive in (*self._posted.values(), *begun))

    # ---- Streams, on the event loop ----

    def enter(self, source: int) -> None:
        """Counts a stream of this member as open."""
        with self.changed:
            self._present[source] = self._present.get(source, 0) + 1

    def leave(self, source: int, reason: str) -> None:
        """Counts a stream of this member as ended."""
        with self.changed:
            self._present[source] -= 1
        self.lose(source, reason)

    def lose(self, source: int, reason: str) -> None:
        """Declares that nothing more comes from this member, unless a stream of its own is still
        open."""
        with self.changed:
            if not self._present.get(source):
                self._gone.setdefault(source, reason)
                self.changed.notify_all()

    def begin(self, route: Route, spec: TensorSpec) -> tuple[ChunkWriter, Callable[[], None]]:
        """Starts a message: returns where its chunks go, and what to call after the last one."""
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
        """Takes a message of bytes that is here whole; they are copied."""
        spec = TensorSpec("data", "uint8", (len(data),), 0, len(data))
        with self.changed:
            message = self._admit(route, spec)
            message.buffer[:] = data
            self._complete(route, message)

    def abandon(self, route: Route) -> None:
        """Removes all trace of a message whose stream has broken."""
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
        """Blocks until is_done(). Raises ExchangeError when nothing of the route can come any more,
        or nothing has in time."""
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
        """Makes room for a message that may come; refuses any other."""
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
        """Returns True for a message of the open step; refuses what is stale or comes twice."""
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
        """Hands a message over when it is complete and waited for."""
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
    """Returns memory that is taken as it is written: an announced message may never come."""
    return np.empty(size_bytes, np.uint8).data

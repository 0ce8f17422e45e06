"""The one interface between stages and the transports of their messages, and the transport in
memory.

A transport belongs to one rank of one membership. It is cut when anything fails and not repaired.
"""

import threading
from collections.abc import Iterable
from typing import Protocol

from stratagem.common.base.errors import StaleError
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.pipeline.stage_message import Address, Message


class StageTransport(Protocol):
    """Carries messages from and to the other ranks. Used by one thread, but for `cut`."""

    def begin(self, step: int, awaited: Iterable[Address]) -> None:
        """Begins a pass: these messages, each once, and none of an older step will be taken."""

    def send(self, address: Address, message: Message) -> None:
        """Returns at once; the message is the transport's from now on."""

    def recv(self, address: Address, timeout_s: float) -> Message:
        """Returns one message. Raises ExchangeError, which names the message, its sender and what
        went wrong."""

    def end(self, timeout_s: float) -> None:
        """Ends the pass: returns when nothing of it is under way any more."""

    def cut(self) -> None:
        """Makes every wait fail soon, here and at the other ranks. From any thread."""


class LocalPost:
    """A store in memory for messages between ranks of one process: the tensors themselves."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._messages: dict[Address, Message] = {}
        self._steps = [-1] * size
        self._taken: list[set[Address]] = [set() for _ in range(size)]
        self._end = ""

    def begin(self, rank: int, step: int) -> None:
        with self._changed:
            self._steps[rank], self._taken[rank] = step, set()

    def put(self, address: Address, message: Message) -> None:
        with self._changed:
            self._check_open()
            if address.step < self._steps[address.target]:
                raise StaleError(f"{address}: member {address.target} is at a later step")
            if address in self._messages or address in self._taken[address.target]:
                raise ExchangeError(f"{address} was sent twice")
            self._messages[address] = message
            self._changed.notify_all()

    def take(self, address: Address, timeout_s: float) -> Message:
        with self._changed:
            self._changed.wait_for(lambda: address in self._messages or self._end, timeout_s)
            self._check_open()
            if address not in self._messages:
                raise ExchangeError(f"receive of {address}: nothing within {timeout_s:g} s")
            self._taken[address.target].add(address)
            return self._messages.pop(address)

    def cut(self) -> None:
        with self._changed:
            self._end = "the party was cut"
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._end:
            raise ExchangeError(self._end)


class LocalTransport:
    """A transport of one rank of a `LocalPost`."""

    def __init__(self, post: LocalPost, rank: int) -> None:
        self._post, self._rank = post, rank

    def begin(self, step: int, awaited: Iterable[Address]) -> None:
        self._post.begin(self._rank, step)

    def send(self, address: Address, message: Message) -> None:
        self._post.put(address, message)

    def recv(self, address: Address, timeout_s: float) -> Message:
        return self._post.take(address, timeout_s)

    def end(self, timeout_s: float) -> None:
        return

    def cut(self) -> None:
        self._post.cut()

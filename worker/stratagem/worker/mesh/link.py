"""The interface of links, over which exchanges transfer their bytes.

A link belongs to one membership of a party: it is formed when all members are present and dropped
when one of them is lost; there is no repair.
"""

import contextvars
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from stratagem.common.base.errors import StratagemError

# ---- Link ----

LEAVE_GRACE_S = 0.5
LEAVE_BYTES_PER_S = 100e6
"""Assumed rate for the remaining transfers after a peer has left, to limit the wait for them."""

Rendezvous = Callable[[bytes], list[bytes]]
"""Exchanges addresses: takes this member's address and returns all members', by rank."""


class ExchangeError(StratagemError):
    """Raised if an exchange cannot complete: a peer is lost or silent, or the exchange was cut.

    The error blames no member.
    """


class PendingTransfer(Protocol):
    """A send or receive in progress. It keeps its tensor alive."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the tensor was sent or received. Raises ExchangeError."""


class Link(Protocol):
    """Interface of links: point-to-point transfers of contiguous tensors among `size` members."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str:
        """Name of the engine: "gloo", "nccl", "grpc"."""

    @property
    def in_order(self) -> bool:
        """True if transfers between two members are matched by order alone, not by tag."""

    def send(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer: ...
    def recv(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer: ...

    def cut(self) -> None:
        """Make every wait fail soon, here and at the peers. May be called from any thread,
        repeatedly."""

    def close(self) -> None:
        """Free the link. No received tensor is written afterwards, if the caller has dropped its
        transfers."""


class MessageLink(Protocol):
    """Interface of links for messages by step and tag, of sizes that receivers do not know."""

    @property
    def name(self) -> str:
        """Name of the engine: "shm", "grpc"."""

    def open_step(self, step: int, awaited: Iterable[tuple[int, int]]) -> None:
        """Open a step: from now on accept these messages, (source, tag), once, no older ones."""

    def send(self, peer: int, tag: int, tensor: Tensor, step: int) -> PendingTransfer: ...

    def take(self, peer: int, step: int, tag: int, timeout_s: float) -> memoryview:
        """Return the bytes of one message, which belong to the caller. Raises ExchangeError."""

    def cut(self) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class CollectiveLink(Link, Protocol):
    """Interface of links whose backend has an all-reduce."""

    def all_reduce(self, tensor: Tensor) -> PendingTransfer:
        """Sum the tensors of all members in place, in the backend's order; a collective call."""


# ---- Forming of a link ----
#
# A separate thread forms a link, so that the caller can stop waiting at once. gloo cannot be told
# to stop connecting: a peer that was lost between the rendezvous and the connection would hold up
# all members until a timeout. A link that comes too late is dropped.


class Formed(Protocol):
    """The result of forming: one link, or several that are cut and closed together."""

    def cut(self) -> None: ...
    def close(self) -> None: ...


F = TypeVar("F", bound=Formed)


class Forming(Generic[F]):
    """A link that is being formed in another thread."""

    def __init__(self, form: Callable[[], F]) -> None:
        self._form = form
        self._link: Future[F] = Future()

    def link(self) -> F:
        """Block until the link is formed; return it. Raises ExchangeError if cut, and the errors of
        forming it."""
        here = contextvars.copy_context()  # the subjects of this thread's log lines
        threading.Thread(target=here.run, args=(self._run,), name="forming", daemon=True).start()
        try:
            return self._link.result()
        except CancelledError:
            raise ExchangeError("cut while the group was being formed") from None

    def cut(self) -> None:
        """End the wait for the link. May be called from any thread, repeatedly."""
        self._link.cancel()

    def _run(self) -> None:
        try:
            link = self._form()
        except BaseException as error:  # raised again by `link`
            with suppress(InvalidStateError):  # the wait has ended
                self._link.set_exception(error)
            return
        try:
            self._link.set_result(link)
        except InvalidStateError:
            link.cut()
            link.close()

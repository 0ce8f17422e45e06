"""A link is the one interface between the reducer and the engines that carry its bytes.

A link belongs to one membership of a party: it is formed when all members are there and thrown away
when one of them is lost; there is no repair. It does not know what it carries.
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
"""After a peer left, what is under way has this long, at this rate, to end well."""

Rendezvous = Callable[[bytes], list[bytes]]
"""Takes this member's address and returns those of all members by rank."""


class ExchangeError(StratagemError):
    """Raised when an exchange cannot end: a peer is lost or silent, or it was cut. Names no
    culprit."""


class PendingTransfer(Protocol):
    """One send or receive under way. It keeps its tensor alive."""

    def wait(self, timeout_s: float) -> None:
        """Returns when the tensor was sent from, or received into. Raises ExchangeError."""


class Link(Protocol):
    """Point-to-point transfers of contiguous tensors among `size` members."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str:
        """The engine's name: "gloo", "nccl", "grpc"."""

    @property
    def in_order(self) -> bool:
        """True when two members' transfers are matched by order alone, not by tag."""

    def send(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer: ...
    def recv(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer: ...

    def cut(self) -> None:
        """Makes every wait fail soon, here and at the peers. From any thread, any number of
        times."""

    def close(self) -> None:
        """Frees the link. After it, nothing writes into a received tensor any more, provided
        that the caller has dropped its Works."""


class MessageLink(Protocol):
    """Point-to-point messages whose sizes the receivers do not know, named by step and tag."""

    @property
    def name(self) -> str:
        """The engine's name: "shm", "grpc"."""

    def open_step(self, step: int, awaited: Iterable[tuple[int, int]]) -> None:
        """Opens a step: from now on takes these messages, (source, tag), of it, each once, and no
        older step's."""

    def send(self, peer: int, tag: int, tensor: Tensor, step: int) -> PendingTransfer: ...

    def take(self, peer: int, step: int, tag: int, timeout_s: float) -> memoryview:
        """Returns the bytes of one message, which are the caller's. Raises ExchangeError."""

    def cut(self) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class CollectiveLink(Link, Protocol):
    """A link whose backend has an all-reduce of its own."""

    def all_reduce(self, tensor: Tensor) -> PendingTransfer:
        """Adds the tensors of all members in place, in an order of the backend's; all members
        call it in the same order."""


# ---- Forming of a link ----
#
# A thread of its own forms a link, so that the caller can stop waiting at once. gloo cannot be told
# to give up connecting: a peer that was lost between the rendezvous and the connection would hold
# all members up until a timeout. A link that comes too late is thrown away.


class Formed(Protocol):
    """A link, or several."""

    def cut(self) -> None: ...
    def close(self) -> None: ...


F = TypeVar("F", bound=Formed)


class Forming(Generic[F]):
    """A link on its way."""

    def __init__(self, form: Callable[[], F]) -> None:
        self._form = form
        self._link: Future[F] = Future()

    def link(self) -> F:
        """Blocks until the link is there. Raises what forming raises, or ExchangeError when cut."""
        here = contextvars.copy_context()  # what the log lines of this thread are about
        threading.Thread(target=here.run, args=(self._run,), name="forming", daemon=True).start()
        try:
            return self._link.result()
        except CancelledError:
            raise ExchangeError("cut while the group was being formed") from None

    def cut(self) -> None:
        """Ends the wait. From any thread, any number of times."""
        self._link.cancel()

    def _run(self) -> None:
        try:
            link = self._form()
        except BaseException as error:  # raised where the link is waited for
            with suppress(InvalidStateError):  # nobody waits any more
                self._link.set_exception(error)
            return
        try:
            self._link.set_result(link)
        except InvalidStateError:
            link.cut()
            link.close()

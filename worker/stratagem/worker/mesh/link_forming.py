"""Forms a link in a thread of its own, so that a caller that waits for it can be called away at
once.

gloo cannot be told to give up connecting; a peer that was lost between the rendezvous and the
connection would hold all members up until a timeout. A link that comes too late is thrown away.
Knows nothing of engines.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from stratagem.worker.mesh.link import ExchangeError


class Formed(Protocol):
    """A link, or several."""

    def cut(self) -> None: ...
    def close(self) -> None: ...


F = TypeVar("F", bound=Formed)


class Forming(Generic[F]):
    """A link on its way."""

    def __init__(self, form: Callable[[], F]) -> None:
        self._form = form
        self._is_over = threading.Event()  # formed, failed or cut
        self._lock = threading.Lock()
        self._link: F | None = None  # guarded by _lock, as all below
        self._error: BaseException | None = None
        self._is_abandoned = False

    def link(self) -> F:
        """Blocks until the link is there. Raises what forming raises, or ExchangeError when cut."""
        here = contextvars.copy_context()  # what the log lines of this thread are about
        threading.Thread(target=here.run, args=(self._run,), name="forming", daemon=True).start()
        self._is_over.wait()
        with self._lock:
            if self._link is not None:
                return self._link
            self._is_abandoned = True
            raise self._error or ExchangeError("cut while the group was being formed")

    def cut(self) -> None:
        """Ends the wait. From any thread, any number of times."""
        self._is_over.set()

    def _run(self) -> None:
        try:
            link = self._form()
        except BaseException as error:  # raised where the link is waited for
            with self._lock:
                self._error = error
        else:
            self._hand_over(link)
        self._is_over.set()

    def _hand_over(self, link: F) -> None:
        with self._lock:
            if not self._is_abandoned:
                self._link = link
                return
        link.cut()
        link.close()

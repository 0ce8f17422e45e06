"""Forms a link in a thread of its own, so that a caller that waits for it can be called away at
once.

gloo cannot be told to give up connecting; a peer that was lost between the rendezvous and the
connection would hold all members up until a timeout. A link that comes too late is thrown away.
Knows nothing of engines.
"""

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
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

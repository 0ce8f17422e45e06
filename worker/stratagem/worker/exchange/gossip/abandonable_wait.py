"""Waits for transfers in a thread that can be left behind.

A transfer whose connection was cut may never be told (gloo), and a thread that waits for it cannot
be called back. So it is not the caller's thread that waits.
"""

import threading
from collections.abc import Sequence

from stratagem.worker.exchange.buckets.transfer_thread import ABANDON_S
from stratagem.worker.mesh.link import ExchangeError, Link, PendingTransfer


class Waiter:
    """Waits on behalf of one thread for the transfers of one link, which it cuts on failure."""

    def __init__(self, link: Link, *, deadline_s: float) -> None:
        self._link, self._deadline_s = link, deadline_s
        self._changed = threading.Condition()
        self._works: list[PendingTransfer] | None = None  # guarded by _changed, as all below
        self._error = ""
        self._is_closed = False
        threading.Thread(target=self._main, name="gossip", daemon=True).start()

    def wait(self, works: Sequence[PendingTransfer]) -> None:
        """Returns when all have ended well. Raises ExchangeError, soon after a cut in any case."""
        with self._changed:
            if works and not self._error:
                self._works = list(works)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._works is None or self._error)
                self._changed.wait_for(lambda: self._works is None, ABANDON_S)
            if self._error:
                raise ExchangeError(self._error)

    def fail(self, reason: str) -> None:
        """Makes the present wait and all later ones raise. From any thread, any number of times."""
        with self._changed:
            self._error = self._error or reason
            self._changed.notify_all()
        self._link.cut()

    def close(self) -> None:
        """Lets the thread end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _main(self) -> None:
        while (works := self._next()) is not None:
            try:
                while works:
                    works.pop(0).wait(self._deadline_s)
            except ExchangeError as error:
                # Only the words are kept: a traceback would keep works, and with them the group.
                self.fail(str(error))
            except BaseException as error:  # a defect of ours must not leave the caller waiting
                self.fail(f"the thread that waits has ended: {error!r}")
                raise
            works.clear()
            with self._changed:
                self._works = None
                self._changed.notify_all()

    def _next(self) -> list[PendingTransfer] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._works is not None or self._is_closed)
            return self._works

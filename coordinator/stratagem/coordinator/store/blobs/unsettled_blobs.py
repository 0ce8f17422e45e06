"""What a process has written, or is to keep, and what no event has named yet.

Whoever writes a blob reports the event that names it right after that, and others may write the
same bytes meanwhile. So each writing is a claim, and each event that names the blob settles the
oldest one. Who never comes to its event loses its claim after a grace. Not for several threads.
"""

from __future__ import annotations

from collections.abc import Callable

from stratagem.common.base.ids import Digest


class Claims:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since_s: dict[Digest, tuple[float, ...]] = {}
        """By blob that this process has written; the oldest claim first."""

    def add(self, digest: Digest) -> None:
        """It was written, or is to be kept, for an event that comes."""
        self._since_s[digest] = (*self._since_s.get(digest, ()), self._monotonic())

    def settle(self, digest: Digest) -> None:
        """The event of one who has written it is durable."""
        if digest in self._since_s:
            self._since_s[digest] = self._since_s[digest][1:]

    def hold(self, digest: Digest, grace_s: float) -> bool:
        """Whether an event that names it may still come."""
        newest_s = self._since_s.get(digest, ())[-1:]
        return any(self._monotonic() - since_s < grace_s for since_s in newest_s)

    def forget(self, digest: Digest) -> None:
        """It is gone."""
        self._since_s.pop(digest, None)

    def forget_old(self, grace_s: float) -> None:
        """What nothing is left to be remembered for."""
        for digest in [each for each in self._since_s if not self.hold(each, grace_s)]:
            del self._since_s[digest]

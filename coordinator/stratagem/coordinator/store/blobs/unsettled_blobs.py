"""Blobs that a process has written, or is to keep, and that no event has named yet.

A writer of a blob reports the event that names it right after that, and others may write the same
bytes meanwhile. So each writing is a claim, and each event that names the blob settles the oldest
one. A claim whose event never comes lapses after a grace period. Not for several threads.
"""

from collections.abc import Callable

from stratagem.common.base.ids import Digest


class Claims:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since_s: dict[Digest, tuple[float, ...]] = {}
        """Times of the claims, by blob that this process has written; the oldest claim first."""

    def add(self, digest: Digest) -> None:
        """Claim a blob that was written, or is to be kept, for an event that is to come."""
        self._since_s[digest] = (*self._since_s.get(digest, ()), self._monotonic())

    def settle(self, digest: Digest) -> None:
        """Remove the oldest claim: the event of one writer is durable."""
        if digest in self._since_s:
            self._since_s[digest] = self._since_s[digest][1:]

    def hold(self, digest: Digest, grace_s: float) -> bool:
        """Return True if an event that names the blob may still come."""
        newest_s = self._since_s.get(digest, ())[-1:]
        return any(self._monotonic() - since_s < grace_s for since_s in newest_s)

    def forget(self, digest: Digest) -> None:
        """Remove all claims of a blob that was deleted."""
        self._since_s.pop(digest, None)

    def forget_old(self, grace_s: float) -> None:
        """Remove the blobs whose claims have all been settled or have lapsed."""
        for digest in [
            candidate for candidate in self._since_s if not self.hold(candidate, grace_s)
        ]:
            del self._since_s[digest]

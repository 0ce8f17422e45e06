"""Which leaves are in use though no list of a kept state may name them: those that an upload relies
on or writes, and those that a reader may still open. For any thread.
"""

import threading
from collections import Counter
from collections.abc import Collection

from stratagem.common.base.ids import Digest


class LeafClaims:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while claims are made of leaves that are there, and while leaves are deleted."""
        self._uploads: set[str] = set()
        self._used: Counter[Digest] = Counter()

    def begin(self, upload: str, leaves: Collection[Digest]) -> None:
        """Note that an upload is under way, and relies on these leaves."""
        with self.lock:
            self._uploads.add(upload)
            self._used.update(leaves)

    def end(self, upload: str, leaves: Collection[Digest]) -> None:
        with self.lock:
            self._uploads.discard(upload)
            self.release(leaves)

    def use(self, leaves: Collection[Digest]) -> None:
        """Note that somebody reads these leaves."""
        with self.lock:
            self._used.update(leaves)

    def release(self, leaves: Collection[Digest]) -> None:
        with self.lock:
            self._used -= Counter(leaves)  # and none is left of those that are 0

    def present(self) -> tuple[frozenset[str], frozenset[Digest]]:
        """Return the uploads that are under way now, and the leaves that are in use."""
        with self.lock:
            return frozenset(self._uploads), frozenset(self._used)

    def is_under_way(self, upload: str) -> bool:
        with self.lock:
            return upload in self._uploads

    def is_used(self, leaf: Digest) -> bool:
        with self.lock:
            return leaf in self._used

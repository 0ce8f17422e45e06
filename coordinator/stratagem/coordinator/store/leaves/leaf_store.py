"""Where the leaves of states are: what a place of them promises, whatever it is.

A leaf is written under the name of an upload, so nothing is overwritten, and there may be equal
copies of it. All methods may be called from any thread, and may block on a disk or a network.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from stratagem.common.base.ids import Digest


class NewLeaf(Protocol):
    """A leaf whose bytes come to the coordinator: write them, then keep it under its digest, or
    drop it."""

    def write(self, data: memoryview) -> None: ...
    def keep(self, digest: Digest, upload: str) -> None: ...
    def drop(self) -> None: ...


class LeafBytes(Protocol):
    """An open leaf; every byte is checked when it is read."""

    def read_into(self, view: memoryview, offset: int) -> None: ...


class LeafStore(Protocol):
    """The leaves of all states of one store."""

    def new(self, upload: str) -> NewLeaf:
        """Begin a leaf of an upload."""

    def open(self, digest: Digest) -> LeafBytes:
        """Open a sound copy of a leaf. Raises MissingBlobError, IntegrityError where no copy has
        the digest."""

    def reliable(self, leaves: Collection[Digest]) -> Collection[Digest]:
        """Return those of the leaves of kept states that need not be written again: nobody but this
        coordinator may delete them."""

    def keep(self, leaves: Sequence[Digest]) -> bool:
        """Make all leaves of a state reliable, as a fact will name it; False where one is
        missing."""

    def lacking(self, upload: str, sizes: Mapping[Digest, int]) -> set[Digest]:
        """Return those of the leaves that an upload is said to have written that are not there with
        their sizes; the others can be committed from now on."""

    def missing(self, leaves: Sequence[Digest]) -> list[Digest]:
        """Return those of the leaves of a state that are not there."""

    def check(self, digest: Digest, upload: str) -> bool:
        """Read what an upload has written of a leaf; True where it has its digest."""

    def found(self) -> Collection[Any]:
        """Return what is there, for `collect`."""

    def collect(
        self, found: Collection[Any], named: Collection[Digest], under_way: Collection[str]
    ) -> None:
        """Delete those of what was found that neither a list nor a claim needs, and equal copies
        but for the newest sound one.

        found: before it was known which leaves are `named`, or in use, and which uploads are under
        way; what has begun since counts, too.
        """

"""The digests of leaves that have not changed since the snapshot before, without hashing them.

Parameters that do not train are the same in each commit, and so are their moments. Their bytes are
compared with those of the snapshot whose leaves were hashed last, which takes a fifth of the time
of SHA-256 where they are equal, and next to none where they are not. Nothing else tells that a
tensor has not changed: torch counts changes in place, but not those by `.data`, by views of the
storage or by other libraries (decision 19). That snapshot is held for one block at a time: when its
memory is wanted for the next one it goes, and leaves are hashed again. Used by several threads.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from stratagem.common.tensors.leaves import leaves_of, pieces_of
from stratagem.common.tensors.same_bytes import are_equal
from stratagem.worker.session.session_states import Frozen

_BLOCK_BYTES: Final = 2**20
_Glimpsing = Callable[[str], AbstractContextManager[Frozen | None]]
_Layout = list[tuple[object, ...]]


class KnownLeaves:
    """The digests of one session's leaves: of the snapshot that was hashed last."""

    def __init__(self, glimpsing: _Glimpsing) -> None:
        """glimpsing: a moment in which the snapshot of a name is looked at, if it is still here."""
        self._glimpsing = glimpsing
        self._name, self._layout = "", _Layout()
        self._digests: dict[int, bytes] = {}

    def hasher(self, state: Frozen) -> "LeafHasher":
        """Return what hashes the leaves of a state, which is the last one from now on."""
        stored = state.manifest.stored()
        layout: _Layout = [(each.name, each.dtype, each.shape, each.offset) for each in stored]
        base, known = self._name, self._digests if layout == self._layout else {}
        found = known if base == state.name else {}
        self._name, self._layout, self._digests = state.name, layout, found
        return LeafHasher(state, lambda: self._glimpsing(base), known, found)


class LeafHasher:
    """Takes the digests of the leaves of one snapshot."""

    def __init__(
        self,
        state: Frozen,
        glimpsing: Callable[[], AbstractContextManager[Frozen | None]],
        known: dict[int, bytes],
        found: dict[int, bytes],
    ) -> None:
        """known: digests of leaves of the base; found: gets those of this one."""
        self._glimpsing, self._known, self._found = glimpsing, known, found
        self._leaves = leaves_of(state.manifest)

    def digest(self, number: int, pieces: Sequence[memoryview]) -> bytes:
        """Return the SHA-256 of a leaf of the state, which these pieces are."""
        digest = self._known.get(number)
        if digest is None or not self._is_same(number, pieces):
            digest = hashed(pieces)
        self._found[number] = digest
        return digest

    def _is_same(self, number: int, pieces: Sequence[memoryview]) -> bool:
        before: Sequence[memoryview] = ()
        for index, piece in enumerate(pieces):
            for at in range(0, len(piece), _BLOCK_BYTES):
                with self._glimpsing() as base:
                    if base is None:  # its memory may be that of the next snapshot now
                        return False
                    if not before:
                        leaf = self._leaves[number]
                        before = list(pieces_of(leaf, base.manifest, base.buffers))
                    block = before[index][at : at + _BLOCK_BYTES]
                    if not are_equal(piece[at : at + _BLOCK_BYTES], block):
                        return False
        return True


def hashed(pieces: Sequence[memoryview]) -> bytes:
    """Return the SHA-256 of all pieces together."""
    sha256 = hashlib.sha256()
    for piece in pieces:
        sha256.update(piece)
    return sha256.digest()

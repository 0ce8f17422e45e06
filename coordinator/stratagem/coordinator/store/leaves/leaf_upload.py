"""An upload of leaves that is under way: what it writes is spared until it ends."""

from collections.abc import Callable, Mapping, Sequence
from typing import Self

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.store.leaves.leaf_claims import LeafClaims
from stratagem.coordinator.store.leaves.leaf_store import LeafStore

WriteList = Callable[[Manifest, Sequence[Digest]], Digest]
"""Makes the list of a state's leaves durable, and returns its digest."""


class DirectUpload:
    """One upload of leaves, from before the first is written until the state is there."""

    def __init__(
        self,
        name: str,
        have: frozenset[Digest],
        leaves: LeafStore,
        claims: LeafClaims,
        write_list: WriteList,
    ) -> None:
        """have: leaves that are in the store, and stay there until the upload ends."""
        self.name, self.have = name, have
        self._leaves, self._claims, self._write_list = leaves, claims, write_list
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Note that nothing is written any more; what no list names is garbage now."""
        if not self._is_over:
            self._is_over = True
            self._claims.end(self.name, self.have)

    def check(self, leaf: Digest) -> bool:
        """Read a leaf that this upload has written; True where it has its digest."""
        return self._leaves.check(leaf, self.name)

    def lacking(self, sizes: Mapping[Digest, int]) -> set[Digest]:
        """Return those of the leaves, given with their sizes, that this upload has not written."""
        return self._leaves.lacking(self.name, sizes)

    def commit(self, manifest: Manifest, leaves: Sequence[Digest]) -> Digest:
        """Make the list of the state durable, and return the state's digest. Raises IntegrityError
        where a leaf is not there."""
        missing = self._leaves.missing(leaves)
        if missing:
            raise IntegrityError(f"{len(missing)} leaves of a state are not there: {missing[0]}")
        return self._write_list(manifest, leaves)

"""The safetensors file that the leaves of a state make, read at any offset."""

from collections.abc import Callable, Iterator
from typing import Final

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import LeafList, leaves_of, places_of
from stratagem.common.tensors.stream import piece_bytes
from stratagem.coordinator.store.blobs.blob_store import DamagedBlobError, MissingBlobError
from stratagem.coordinator.store.leaves.leaf_store import LeafBytes

_NUM_OPEN: Final = 4


class JoinedState:
    """The bytes of a state in leaves, which are opened when they are read. Each is verified."""

    is_in_leaves = True

    def __init__(
        self, digest: Digest, listed: LeafList, open_leaf: Callable[[Digest], LeafBytes]
    ) -> None:
        self._digest, self._listed, self._open_leaf = digest, listed, open_leaf
        self._places = places_of(leaves_of(listed.manifest))
        self._at = 0
        """The place that was read last: the next one is near."""
        self._open: dict[int, LeafBytes] = {}
        self.num_bytes = len(listed.header) + listed.manifest.total_bytes

    def read_into(self, view: memoryview, offset: int) -> None:
        num_head = len(self._listed.header)
        head = self._listed.header[offset : offset + len(view)]
        view[: len(head)] = head
        done = len(head)
        while done < len(view):
            self._seek(offset + done - num_head)
            place = self._places[self._at]
            skipped = offset + done - num_head - place.offset
            size = min(place.size - skipped, len(view) - done)
            self._leaf(place.leaf).read_into(view[done : done + size], place.start + skipped)
            done += size

    def source(self, offset: int) -> Iterator[bytes]:
        """Yield the data from an offset on, checked, up to the ends of chunks."""
        total_bytes = self._listed.manifest.total_bytes
        length = piece_bytes(total_bytes)
        while offset < total_bytes:
            piece = bytearray(min(length - offset % length, total_bytes - offset))
            self.read_into(memoryview(piece), len(self._listed.header) + offset)
            offset += len(piece)
            yield bytes(piece)

    def offer(self) -> None:
        """Return None: it is in no one file."""

    def check(self, offset: int, frame: bytes) -> None:
        """Do nothing: what the source gives has been checked."""

    def _seek(self, offset: int) -> None:
        """Find the place of a byte of the data."""
        if offset < self._places[self._at].offset:
            self._at = 0
        while offset >= self._places[self._at].offset + self._places[self._at].size:
            self._at += 1

    def _leaf(self, number: int) -> LeafBytes:
        leaf = self._open.get(number)
        if leaf is None:
            named = self._listed.digests[number]
            try:
                leaf = self._open_leaf(named)
            except IntegrityError as error:
                raise DamagedBlobError(self._digest, str(error)) from error
            except MissingBlobError as error:
                raise DamagedBlobError(self._digest, f"its leaf {named} is not there") from error
            while len(self._open) >= _NUM_OPEN:
                del self._open[next(iter(self._open))]
            self._open[number] = leaf
        return leaf

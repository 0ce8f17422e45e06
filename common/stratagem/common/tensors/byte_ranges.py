"""Ranges of the bytes that a manifest describes: read from the buffers of its tensors, and the
tensor of bytes as which they travel. Must not know torch, files or workers."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from stratagem.common.base.errors import OutOfRangeError
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest

_NAME: Final = "pieces"


class ByteReader:
    """Reads ranges of bytes that lie in several buffers, one after the other."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """buffers: of the tensors that are stored, in the order of their manifest."""
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._starts = [0, *accumulate(map(len, self._buffers))]

    def views(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yield the bytes from `offset` on as views. Raises OutOfRangeError beyond the end."""
        if offset + size > self._starts[-1]:
            text = f"{size} bytes from {offset} on end behind the {self._starts[-1]} that are here"
            raise OutOfRangeError.at("range", text)
        at = bisect_right(self._starts, offset) - 1
        while size:
            begin = offset - self._starts[at]
            view = self._buffers[at][begin : begin + size]
            yield view
            offset, size, at = offset + len(view), size - len(view), at + 1

    def all_views(self, ranges: Iterable[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of ranges (offset, size) as views, in their order."""
        return [view for offset, size in ranges for view in self.views(offset, size)]


def pieces_manifest(num_bytes: int) -> Manifest:
    """Describe so many bytes of some ranges as what a stream carries."""
    return build_manifest([(_NAME, "uint8", (num_bytes,))], Purpose.STATE)

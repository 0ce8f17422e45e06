"""Chunks of one file, shared by several receivers that read it at about the same time.

A chunk is read, checksummed and framed once; the newest ones are kept, so a receiver that is
slightly behind finds them ready, and one that is far behind makes its own. Memory is a few chunks,
whatever the file's size and the number of receivers. Runs on the event loop.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from stratagem.common.tensors.files import FileSource
from stratagem.common.tensors.stream import frame
from stratagem.v1 import tensor_pb2

NUM_KEPT: Final = 4


class SharedFrames:
    """The frames of the range that `source` reads, which is total_bytes long."""

    def __init__(
        self,
        source: FileSource,
        total_bytes: int,
        check: Callable[[int, bytes], None],
        offer: Callable[[], tensor_pb2.OpenFile | None],
    ) -> None:
        """Set up without reading; check is called with the offset and bytes of each frame once it
        is made. offer: to who reads the same bytes by itself, as long as this lives."""
        self.offer = offer
        self._source = source
        self._check = check
        self._total_bytes = total_bytes
        self._kept: OrderedDict[int, tuple[bytes, int]] = OrderedDict()  # (frame, bytes of data)

    def __call__(self, offset: int) -> Iterator[bytes]:
        """Yield the frames from an offset on."""
        pieces: Iterator[bytes] | None = None  # stands at the offset, or is not open
        while offset < self._total_bytes:
            made = self._kept.get(offset)
            if made is None:
                if pieces is None:
                    pieces = self._source(offset)
                made = self._keep(offset, next(pieces))
            else:
                pieces = None
            yield made[0]
            offset += made[1]

    def _keep(self, offset: int, piece: bytes) -> tuple[bytes, int]:
        made = frame(offset, piece)
        self._check(offset, made)
        self._kept[offset] = made, len(piece)
        if len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)
        return self._kept[offset]

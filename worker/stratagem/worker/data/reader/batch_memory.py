"""Memory that a reader writes batches to and its worker maps: segments without a name.

A segment holds one batch and is written again once the worker has let go of that. As many are made
as batches are in use at once; one that is too small is replaced. Knows neither batches nor
messages.
"""

import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

_SPARE: Final = 8
"""A new segment has room for this part more than is wanted: batches differ in size."""


@dataclass(frozen=True, slots=True)
class BatchSegment:
    """A piece of memory, by its number."""

    number: int
    memory: Tensor
    """Bytes."""


class WrittenSegments:
    """The segments of a reader, in the process that writes them."""

    def __init__(self) -> None:
        self._free: list[BatchSegment] = []
        self._used: dict[int, BatchSegment] = {}

    def take(self, size: int) -> tuple[BatchSegment, int | None]:
        """Returns a segment of at least `size` bytes; and, if it is new, its file, which the caller
        closes. It may have the number of one that was too small."""
        segment = self._free.pop() if self._free else None
        if segment is not None and segment.memory.shape[0] >= size:
            self._used[segment.number] = segment
            return segment, None
        number = len(self._used) if segment is None else segment.number
        fd = _file(size + size // _SPARE)
        made = self._used[number] = BatchSegment(number, torch.from_numpy(_mapped(fd)))
        return made, fd

    def free(self, number: int) -> None:
        """Takes note that a segment may be written again."""
        self._free.append(self._used.pop(number))


class MappedSegments:
    """The segments of a reader, in the process that reads them."""

    def __init__(self) -> None:
        self._mapped: dict[int, np.ndarray] = {}

    def map(self, number: int, fd: int) -> None:
        """Maps a segment, which takes the place of another one of its number. Closes the file."""
        try:
            self._mapped[number] = _mapped(fd)
        finally:
            os.close(fd)

    def view(self, number: int, forgotten: Callable[[int], object]) -> Tensor:
        """Returns the bytes of a segment. `forgotten` is called with its number, by any thread,
        once no tensor refers to them."""
        seen = self._mapped[number][:]
        weakref.finalize(seen, forgotten, number).atexit = False
        return torch.from_numpy(seen)


def _file(size: int) -> int:
    """Makes a file in memory with its pages: to run out of memory later would kill the process."""
    fd = os.memfd_create("stratagem-batch", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    except OSError:
        os.close(fd)
        raise
    return fd


def _mapped(fd: int) -> np.ndarray:
    size = os.fstat(fd).st_size
    mapped = mmap.mmap(fd, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return np.frombuffer(mapped, dtype=np.uint8)

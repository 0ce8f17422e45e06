"""Reads the files of accepted updates; every byte that is used is checked.

Holds no file open, and nothing that grows with the model but a checksum for each block: clients are
many. Knows nothing of codecs or rounds.
"""

import os
from array import array
from collections.abc import Iterator
from typing import Final, Protocol

import google_crc32c
import numpy as np

from stratagem.common.base.errors import IntegrityError
from stratagem.common.compression import ByteArray
from stratagem.coordinator.store.blobs.durable_file import open_regular
from stratagem.coordinator.updates.numpy_floats import Raw
from stratagem.coordinator.updates.spool_upload import SpoolEntry

_BLOCK_BYTES: Final = 1 << 16
_READ_BYTES: Final = 16 * _BLOCK_BYTES


class Source(Protocol):
    """Reads one update as windows of the model's data, from the first to the last.

    Raises IntegrityError for one that the disk has damaged.
    """

    def read(self, offset: int, into: Raw) -> None:
        """Fill the array with the elements from that byte of the model's data on."""

    def check(self) -> None:
        """Check that what was read, which must be all, is what was accepted."""


class WholeSource:
    """Reads an update that has the layout of the model."""

    def __init__(self, entry: SpoolEntry) -> None:
        self._entry = entry
        self._crc32c = 0

    def read(self, offset: int, into: Raw) -> None:
        elements = into.view(np.uint8)
        read_file(self._entry, self._entry.data_start + offset, elements)
        self._crc32c = google_crc32c.extend(self._crc32c, elements)

    def check(self) -> None:
        if self._crc32c != self._entry.crc32c:
            raise damaged(self._entry, "its checksum is another")


class CheckedData:
    """The data of an update, which are read in any order.

    Their checksum is compared first; meanwhile one is taken of each block, with which the block is
    compared whenever it is read.
    """

    def __init__(self, entry: SpoolEntry) -> None:
        """Read all data once. Raises IntegrityError where they are damaged."""
        self._entry = entry
        self._blocks = array("I")
        crc32c = 0
        for start in range(0, entry.data_bytes, _READ_BYTES):
            piece = self._data(start, start + _READ_BYTES)
            self._blocks.extend(map(google_crc32c.value, _blocks(piece)))
            crc32c = google_crc32c.extend(crc32c, piece)
        if crc32c != entry.crc32c:
            raise damaged(entry, "its checksum is another")

    def read(self, offset: int, num: int, dtype: str) -> Raw:
        """Return elements of the data from a byte on. Raises IntegrityError where they have
        changed."""
        end = offset + num * np.dtype(dtype).itemsize
        first, skipped = divmod(offset, _BLOCK_BYTES)
        last = -(-end // _BLOCK_BYTES)
        data = self._data(first * _BLOCK_BYTES, last * _BLOCK_BYTES)
        if list(map(google_crc32c.value, _blocks(data))) != self._blocks[first:last].tolist():
            raise damaged(self._entry, "it has changed since it was checked")
        return data[skipped:][: end - offset].view(dtype)

    def _data(self, start: int, stop: int) -> ByteArray:
        """Return a range of the data, as far as there are any; not checked."""
        data = np.empty(max(0, min(stop, self._entry.data_bytes) - start), np.uint8)
        read_file(self._entry, self._entry.data_start + start, data)
        return data


def _blocks(data: ByteArray) -> Iterator[ByteArray]:
    return (data[at : at + _BLOCK_BYTES] for at in range(0, data.size, _BLOCK_BYTES))


def read_file(entry: SpoolEntry, start: int, into: ByteArray) -> None:
    """Fill the array with bytes of an update's file, which are not checked. Raises IntegrityError
    where the file ends before."""
    view = into.data
    descriptor = open_regular(entry.path)
    try:
        done = 0
        while done < len(view):
            got = os.preadv(descriptor, [view[done:]], start + done)
            if got == 0:
                raise damaged(entry, "it ends too early")
            done += got
    finally:
        os.close(descriptor)


def damaged(entry: SpoolEntry, what: str) -> IntegrityError:
    """Return the error for an update that is not what was accepted."""
    return IntegrityError(f"the accepted update {entry.path.name} is damaged: {what}")

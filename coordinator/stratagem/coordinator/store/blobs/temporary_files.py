"""Files without a name of their own yet: locked while their writer lives, removed when it is gone.

Owns scratch space too. Knows neither blobs nor spools.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from stratagem.coordinator.store.blobs.durable_file import (
    MakeRoom,
    no_room,
    pieces,
    space_needed,
    write_all,
)


class Scratch:
    """A file of bytes that will become part of a blob, read in another order than they came. Not
    durable."""

    def __init__(self, folder: Path, make_room: MakeRoom = no_room) -> None:
        self._make_room = make_room
        with space_needed():
            self._temporary, self._descriptor = new_temporary(folder)

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes. Raises UnavailableError when the disk is full."""
        write_all(self._descriptor, data, self._make_room)

    def read(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        """Yield a range of what was written, in pieces that share one buffer."""
        yield from pieces(self._descriptor, num_bytes, offset)

    def kept(self) -> int:
        """Return the descriptor of what was written, which the caller closes; it has no name any
        more."""
        self._temporary.unlink(missing_ok=True)
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def close(self) -> None:
        """Delete what was written; no error after the first time."""
        if self._descriptor >= 0:
            self._temporary.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def new_temporary(folder: Path) -> tuple[Path, int]:
    """Create a new file, locked: the lock shows that its writer is alive, in whatever process."""
    while True:
        path = folder / secrets.token_hex(8)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # else a cleaner came between the two calls
            return path, descriptor
        os.close(descriptor)


def remove_if_abandoned(path: Path) -> None:
    """Remove a temporary file whose writer is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)

"""Files that are read again when they have been written or replaced, without a restart."""

import os
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import structlog

from stratagem.common.base.errors import InvalidInputError

log = structlog.get_logger()
T = TypeVar("T")

Stamp: TypeAlias = tuple[tuple[int, int, int], ...]
"""Per file: when it was written, its inode, its bytes."""


def stamp_of(*paths: str | PathLike[str]) -> Stamp:
    """Return a stamp that changes when the file has been written or replaced. Raises OSError."""
    stats = [os.stat(path) for path in paths]
    return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats)


class WatchedFile(Generic[T]):
    """Content of a file that is read again when it changes; an unusable file leaves the earlier
    content."""

    def __init__(self, path: Path, read: Callable[[Path], T], *, what: str) -> None:
        """read raises InvalidInputError, which ends this at the start and is logged later on."""
        self._path, self._read, self._what = path, read, what
        self._seen = self._stamp()
        self._content = read(path)

    def content(self) -> T:
        """Return the content of the file as it is now."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            try:
                self._content = self._read(self._path)
            except InvalidInputError as error:
                log.warning(f"the {self._what} stay as they were", reason=str(error))
            else:
                log.info(f"{self._what} read again", path=str(self._path))
        return self._content

    def _stamp(self) -> Stamp:
        try:
            return stamp_of(self._path)
        except OSError:
            return ()

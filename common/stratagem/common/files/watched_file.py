"""Files that are read again when they have been written or replaced, without a restart."""

import os
from collections.abc import Callable, Iterable
from os import PathLike
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


class WatchedFiles(Generic[T]):
    """The content of files, read again when one of them changes; files that cannot be used leave
    the earlier content."""

    def __init__(
        self,
        paths: Iterable[str | PathLike[str]],
        read: Callable[[], T],
        *,
        unusable: str,
        renewed: str = "",
    ) -> None:
        """read raises InvalidInputError, which ends this at the start. unusable, renewed: what is
        logged when the files have changed, and cannot or can be used."""
        self._paths, self._read = tuple(paths), read
        self._unusable, self._renewed = unusable, renewed
        self._seen = self._stamp()
        self.content = read()
        """As it was when `renewed` looked last."""

    def renewed(self) -> bool:
        """Look at the files; return whether there is new content."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self.content = self._read()
        except InvalidInputError as error:
            log.warning(self._unusable, reason=str(error))
            return False
        if self._renewed:
            log.info(self._renewed, path=", ".join(map(str, self._paths)))
        return True

    def newest(self) -> T:
        """Return the content of the files as they are now."""
        self.renewed()
        return self.content

    def _stamp(self) -> Stamp:
        try:
            return stamp_of(*self._paths)
        except OSError:  # it is not there, or just being replaced
            return ()

"""Write files atomically, create private files, and reload files that change."""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import BinaryIO, Generic, TypeAlias, TypeVar

import structlog

from stratagem.common.base.errors import InvalidInputError

# ---- Atomic files ----


@contextmanager
def whole_file(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """Context manager that opens a file which replaces `path` if the block ends without an error;
    otherwise nothing changes.

    mode: the permissions of the file, less the umask; it never has more, not for a moment. durable:
    flush the file to disk before it replaces `path`. Raises OSError that names `path`.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)  # left by a killed process with this number
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, so that new and renamed files survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Private files ----
#
# Private keys, and a process's notes about its work, may be read only by some. A key's group may
# read it: Kubernetes gives the group of a pod its secrets (`fsGroup`), and a service account is
# often a group of its own. Others may not.


def check_private(field: str, path: str | PathLike[str]) -> None:
    """Raise InvalidInputError, which names the field, the file and its mode, if anyone but the
    owner and the group may read or change a private key."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise InvalidInputError.at(field, f"{path}: {error.strerror}") from None
    if mode & stat.S_IRWXO:
        raise InvalidInputError.at(
            field,
            f"{path} has the mode {mode:04o}: everybody on this machine has this private key. Only "
            f"its owner (chmod 600) and its group (640) may have it; if others have been here, "
            f"make a new one",
        )


def create_private(path: str | PathLike[str]) -> BinaryIO:
    """Create or empty a file, so that only its owner may read it. Raises OSError."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    file = open(path, "w+b", opener=opener)  # noqa: SIM115  (the caller closes it)
    os.fchmod(file.fileno(), 0o600)  # an existing file keeps its mode
    return file


# ---- Watched files ----
#
# A watched file is read again when it has been written or replaced, without a restart.

log = structlog.get_logger()
T = TypeVar("T")

Stamp: TypeAlias = tuple[tuple[int, int, int], ...]
"""The modification time, inode and size of each watched file; a change of the file changes them."""


def stamp_of(*paths: str | PathLike[str]) -> Stamp:
    """Return a stamp of the files that changes when one is written or replaced. Raises OSError."""
    stats = [os.stat(path) for path in paths]
    return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats)


class WatchedFiles(Generic[T]):
    """The parsed content of files, reloaded when one changes; unusable changes are ignored."""

    def __init__(
        self,
        paths: Iterable[str | PathLike[str]],
        read: Callable[[], T],
        *,
        unusable: str,
        renewed: str = "",
    ) -> None:
        """Read the files. `read` parses them; an InvalidInputError that it raises is passed on.
        unusable and renewed: the messages to log when changed files cannot, or can, be used."""
        self._paths, self._read = tuple(paths), read
        self._unusable, self._renewed = unusable, renewed
        self._seen = self._stamp()
        self.content = read()
        """The parsed content of the files, as of the last call of `renewed`."""

    def renewed(self) -> bool:
        """Reload the files if one has changed; return whether `content` has been replaced."""
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
        """Return the current content of the files, reloaded if necessary."""
        self.renewed()
        return self.content

    def _stamp(self) -> Stamp:
        try:
            return stamp_of(*self._paths)
        except OSError:  # the file is missing or just being replaced
            return ()

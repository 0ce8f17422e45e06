"""A folder for the unix sockets of a process, and the removal of those that killed ones have left.

A folder is locked as long as its process lives: the kernel forgets the lock of one that was killed,
in whatever container it ran. So a lock that can be had says that nobody uses the folder any more.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "stratagem-sockets-"
LONGEST_PATH: Final = 107
"""Bytes that the path of a unix socket may have."""
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SocketFolder:
    """A folder for unix sockets that its owner alone may enter; made when the first is asked for,
    which is when folders of this user that nobody uses any more are removed."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = -1

    def path(self, name: str) -> str:
        """Return the path for a socket of this name."""
        if self._folder is None:
            place = Path(tempfile.gettempdir())
            if len(os.fsencode(place / PREFIX / name)) + 8 > LONGEST_PATH:  # 8: what mkdtemp draws
                place = Path("/tmp")
            remove_abandoned(place)
            self._folder, self._lock = _locked(place)
        return str(self._folder / name)

    def close(self) -> None:
        """Remove the folder with its sockets."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder, self._lock = None, -1


def remove_abandoned(place: Path) -> None:
    """Remove the folders of this user whose processes are gone."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone already, in use, another user's, or no folder
            descriptor = os.open(folder, _FLAGS)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _locked(place: Path) -> tuple[Path, int]:
    """Make a folder and lock it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))  # its mode is 0700
        try:
            descriptor = os.open(folder, _FLAGS)
        except FileNotFoundError:  # a cleaner came between the two calls
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():  # else a cleaner held the lock
            return folder, descriptor
        os.close(descriptor)

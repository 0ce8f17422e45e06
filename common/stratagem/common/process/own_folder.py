"""Folders that one process alone uses, and the removal of those that killed ones have left.

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

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnFolder:
    """A folder that its owner alone may enter, and that goes with its process."""

    def __init__(self, place: Path, prefix: str) -> None:
        """Make the folder: in `place`, with a name that begins with the prefix."""
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))  # its mode is 0700
            try:
                self._lock = os.open(self.path, _FLAGS)
            except FileNotFoundError:  # a cleaner came between the two calls
                continue
            with suppress(OSError):  # no locks here: so no cleaner gets one either
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():  # else a cleaner held the lock
                return
            os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(place: Path, prefix: str) -> None:
    """Remove the folders of this user with such names whose processes are gone.

    In a place that machines share, a prefix must be of one of them: they may not see each other's
    locks.
    """
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError):  # gone already, in use, another user's, or no folder
            descriptor = os.open(folder, _FLAGS)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)

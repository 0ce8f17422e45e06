"""Folders that one process alone uses, and the removal of those that killed ones have left.

A folder is locked as long as its process lives: the kernel forgets the lock of one that was killed,
in whatever container it ran. So a lock that can be had says that nobody uses the folder any more.
"""

import fcntl
import os
import platform
import shutil
import tempfile
from contextlib import suppress
from hashlib import blake2s
from pathlib import Path
from typing import Final, Self

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnFolder:
    """A folder that its owner alone may enter, and that goes with its process."""

    def __init__(self, place: Path, prefix: str) -> None:
        """Make the folder: in `place`, with a name that begins with the prefix."""
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))  # its mode is 0700
            try:
                self._lock: int | None = os.open(self.path, _FLAGS)
            except FileNotFoundError:  # a cleaner came between the two calls
                continue
            with suppress(OSError):  # no locks here: so no cleaner gets one either
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():  # else a cleaner held the lock
                return
            os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder and all that is in it. Idempotent."""
        if self._lock is not None:
            with suppress(OSError):
                remove_tree(self.path)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


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
                    remove_tree(folder)
            finally:
                os.close(descriptor)


def machine_prefix() -> str:
    """Return how names of temporary folders begin: they name this machine, and when it was booted,
    so that others that have the place too, and may not see its locks, remove none of them."""
    try:
        booted = _BOOT.read_text()
    except OSError:  # not Linux
        booted = platform.node()
    return f"stratagem-{blake2s(booted.encode(), digest_size=4).hexdigest()}-"


def temporary_folder(kind: str, place: Path | None = None) -> OwnFolder:
    """Make a folder of this process for temporary files, and remove those of killed ones.

    kind: a word for its name. place: the temporary directory unless given.
    """
    remove_temporary(place)
    return OwnFolder(place or Path(tempfile.gettempdir()), f"{machine_prefix()}{kind}-")


def remove_temporary(place: Path | None = None) -> None:
    """Remove the temporary folders that killed processes of this machine and user have left.

    place: the temporary directory unless given, and /tmp, where sockets are if the name of that one
    is too long for them.
    """
    for each in {Path(tempfile.gettempdir()), Path("/tmp")} if place is None else {place}:
        remove_abandoned(each, machine_prefix())


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it, also from folders that nobody may write into."""
    with suppress(FileNotFoundError):
        for where, _, _ in os.walk(path):
            os.chmod(where, 0o700)
        shutil.rmtree(path)

"""Files that only some may read: private keys, and what a process notes about its work.

Owns what is too open, and how such a file is made. A key's group may read it: Kubernetes gives the
group of a pod its secrets (`fsGroup`), and a service account is often a group of its own. Everybody
may not.
"""

import os
import stat
from os import PathLike
from typing import BinaryIO

from stratagem.common.base.errors import InvalidInputError


def check_private(field: str, path: str | PathLike[str]) -> None:
    """InvalidInputError names the field, the file and its mode when others than its owner and its
    group may read a private key, or change it."""
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
    """An empty file to write and read, which its owner alone may read.

    Raises OSError, as `open` does.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    file = open(path, "w+b", opener=opener)  # noqa: SIM115  (the caller closes it)
    os.fchmod(file.fileno(), 0o600)  # one that was there keeps its mode
    return file

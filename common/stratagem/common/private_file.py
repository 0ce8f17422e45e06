"""Files that only some may read: private keys.

Owns what is too open. A file's group may read it: Kubernetes gives the group of a pod its secrets
(`fsGroup`), and a service account is often a group of its own. Everybody may not.
"""

from __future__ import annotations

import os
import stat
from os import PathLike

from stratagem.common.errors import InvalidInputError


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

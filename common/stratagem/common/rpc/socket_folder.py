"""A folder for the unix sockets of a process."""

import os
import tempfile
from pathlib import Path
from typing import Final

from stratagem.common.process.own_folder import OwnFolder, machine_prefix, temporary_folder

KIND: Final = "sockets"
LONGEST_PATH: Final = 107
"""Bytes that the path of a unix socket may have."""


class SocketFolder:
    """A folder for unix sockets that its owner alone may enter; made when the first is asked for,
    which is when those of this user that killed processes have left are removed."""

    def __init__(self) -> None:
        self._folder: OwnFolder | None = None

    def path(self, name: str) -> str:
        """Return the path for a socket of this name."""
        if self._folder is None:
            place = Path(tempfile.gettempdir())
            drawn = f"{machine_prefix()}{KIND}-{8 * 'x'}"  # by mkdtemp
            if len(os.fsencode(place / drawn / name)) > LONGEST_PATH:
                place = Path("/tmp")
            self._folder = temporary_folder(KIND, place)
        return str(self._folder.path / name)

    def close(self) -> None:
        """Remove the folder with its sockets."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

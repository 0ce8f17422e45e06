"""A folder for the unix sockets of a process."""

import os
import tempfile
from pathlib import Path
from typing import Final

from stratagem.common.process.own_folder import OwnFolder, remove_abandoned

PREFIX: Final = "stratagem-sockets-"
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
            if len(os.fsencode(place / PREFIX / name)) + 8 > LONGEST_PATH:  # 8: what mkdtemp draws
                place = Path("/tmp")
            remove_abandoned(place, PREFIX)
            self._folder = OwnFolder(place, PREFIX)
        return str(self._folder.path / name)

    def close(self) -> None:
        """Remove the folder with its sockets."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

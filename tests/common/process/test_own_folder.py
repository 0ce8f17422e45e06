"""Folders of one process: see test_socket_folder.py and test_received_files.py for what killed
processes leave."""

import fcntl
from pathlib import Path

import pytest

from stratagem.common.process.own_folder import OwnFolder, remove_abandoned


def refuse(*_: object) -> None:
    raise OSError("no locks here")


def test_where_there_are_no_locks_folders_are_made_and_none_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = OwnFolder(tmp_path, "a-")
    remove_abandoned(tmp_path, "a-")
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()

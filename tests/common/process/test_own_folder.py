"""Folders of one process: see test_socket_folder.py and test_received_files.py for what killed
processes leave."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.common.process.process import (
    OwnFolder,
    remove_abandoned,
    remove_temporary,
    temporary_folder,
)


def refuse(*_: object) -> None:
    raise OSError("no locks here")


def test_without_locks_no_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = OwnFolder(tmp_path, "a-")
    remove_abandoned(tmp_path, "a-")
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()


LEFT = """
import sys
from stratagem.common.process.process import temporary_folder
inside = temporary_folder("code").path / "bundle"
inside.mkdir()
(inside / "m.py").touch()
inside.chmod(0o555)
print("made", flush=True)
sys.stdin.read()
"""


def test_what_killed_processes_of_this_machine_leave_goes_and_no_more(tmp_path: Path) -> None:
    """Also from folders that nobody may write into; another machine has the place, too."""
    elsewhere = tmp_path / "stratagem-00000000-code-x"
    elsewhere.mkdir()
    killed = subprocess.Popen(
        [sys.executable, "-c", LEFT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        remove_temporary(tmp_path)
        [left] = {*tmp_path.iterdir()} - {elsewhere}  # in use
        killed.kill()
    with temporary_folder("sockets", tmp_path) as mine:
        assert {*tmp_path.iterdir()} == {elsewhere, mine.path}, left
    mine.remove()
    assert [*tmp_path.iterdir()] == [elsewhere]

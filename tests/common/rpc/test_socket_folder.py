"""Folders of unix sockets: what a killed process has left is removed, and nothing in use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.common.process.process import machine_prefix
from stratagem.common.rpc.streams import SocketFolder

CHILD = """
import sys
from stratagem.common.rpc.streams import SocketFolder
print(SocketFolder().path("a.sock"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def child() -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip()).parent


def test_the_folder_is_for_its_owner_and_goes_with_its_process(place: Path) -> None:
    folder = SocketFolder()
    path = Path(folder.path("a.sock"))
    assert path.parent.parent == place
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert Path(folder.path("b.sock")).parent == path.parent
    path.touch()
    folder.close()
    assert not [*place.iterdir()]


def test_what_a_killed_process_has_left_is_removed_and_nothing_in_use(place: Path) -> None:
    alive, in_use = child()
    killed, left = child()
    (left / "a.sock").touch()
    killed.kill()
    killed.communicate()
    mine = SocketFolder()
    path = Path(mine.path("a.sock"))
    assert {*place.iterdir()} == {in_use, path.parent}
    other = SocketFolder()
    other.path("a.sock")
    assert path.parent.exists(), "one process may have several"
    mine.close()
    other.close()
    assert {*place.iterdir()} == {in_use}
    alive.communicate()
    assert in_use.exists(), "it ended without closing, as a killed one does"


def test_what_only_has_such_a_name_stays(place: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    link, file = (place / f"{machine_prefix()}{end}" for end in "xy")
    link.symlink_to(tmp_path)
    file.touch()
    folder = SocketFolder()
    folder.path("a.sock")
    folder.close()
    assert os.path.lexists(link)
    assert file.exists()
    assert (tmp_path / "kept").exists()


def test_a_long_place_is_left_for_another_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = place / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = SocketFolder()
    assert Path(folder.path("a.sock")).parent.parent == Path("/tmp")
    folder.close()


def test_a_folder_that_is_taken_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    taken: list[Path] = []

    def open_late(path: str, *arguments: int, **keywords: int) -> int:
        descriptor = real(path, *arguments, **keywords)
        if not taken:
            taken.append(Path(path))
            os.rmdir(path)
        return descriptor

    monkeypatch.setattr("os.open", open_late)
    folder = SocketFolder()
    path = Path(folder.path("a.sock"))
    assert path.parent.exists()
    assert taken
    assert path.parent != taken[0]
    folder.close()

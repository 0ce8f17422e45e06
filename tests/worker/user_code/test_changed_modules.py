"""A module that has changed on disk since it was imported is told of; one that has not is not."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.worker.user_code import watching as changes
from stratagem.worker.user_code.entrypoints import EntryPoints

NAMES = ("changing_task", "changing_helper", "changing_other")


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(changes, "_seen", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "changing_task.py").write_text("import changing_helper\ndef build(): return 1\n")
    (tmp_path / "changing_helper.py").write_text("VALUE = 1\n")
    (tmp_path / "changing_other.py").write_text("VALUE = 1\n")
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


def changed() -> list[str]:
    return [name for name, _ in changes.changed_modules()]


def touch(path: Path) -> None:
    """As if it was written a second later."""
    stamp = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(stamp, stamp))


def test_what_an_entry_point_has_imported_is_looked_after(folder: Path) -> None:
    EntryPoints(["changing_task:*"], [folder]).resolve("changing_task:build")
    assert changed() == []
    (folder / "changing_other.py").write_text("VALUE = 2\n")
    assert changed() == [], "it was not imported"
    helper = folder / "changing_helper.py"
    helper.write_text("VALUE = 2\n")
    touch(helper)  # where the clock of files is too coarse for a test
    assert list(changes.changed_modules()) == [("changing_helper", str(helper))]
    assert changed() == ["changing_helper"], "for as long as it is so"
    helper.write_text("VALUE = 1\n")
    touch(helper)
    assert changed() == [], "what is imported is what the file says again"


def test_a_file_that_was_touched_has_not_changed_and_one_that_is_gone_has(folder: Path) -> None:
    EntryPoints(["changing_task:*"], [folder]).resolve("changing_task:build")
    touch(folder / "changing_task.py")
    assert changed() == []
    (folder / "changing_task.py").unlink()
    assert changed() == ["changing_task"]


def test_what_is_installed_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(folder))
    EntryPoints(["changing_task:*"], [folder]).resolve("changing_task:build")
    assert changes._seen == {}
    monkeypatch.undo()
    monkeypatch.setattr(changes, "_seen", {})
    root = Path(changes.__file__).parents[4]
    changes.see_modules([root])
    assert not [name for name in changes._seen if name.startswith("stratagem")]
    changes.see_modules([])

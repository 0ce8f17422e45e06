"""Which files of a folder travel with a job."""

import os
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.sdk.code_folder import bundle_of
from stratagem.common.base.errors import InvalidInputError, LimitError
from stratagem.common.code.bundle import unpack
from stratagem.common.job import CodeSpec


def make(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def taken(folder: Path, **patterns: Any) -> set[str]:
    return set(unpack(bundle_of(CodeSpec(path=str(folder), **patterns))))


def test_files_that_are_no_code_stay_at_home(tmp_path: Path) -> None:
    make(
        tmp_path,
        {
            ".gitignore": "*.log\n/data/\n",
            "model.py": "",
            "notes.log": "",
            "data/rows.bin": "",
            "package/data/table.json": "",
            "package/__pycache__/model.cpython-311.pyc": "",
            "package/.secret": "",
            ".venv/lib/module.py": "",
            "package/.gitignore": "generated_*\n!generated_kept.py\n!kept.log\n",
            "package/generated_a.py": "",
            "package/generated_kept.py": "",
            "package/kept.log": "",
        },
    )
    (tmp_path / "linked.py").symlink_to("model.py")
    (tmp_path / "folder").symlink_to("package")
    (tmp_path / "nowhere").symlink_to("missing")
    os.mkfifo(tmp_path / "pipe")
    kept = {"package/data/table.json", "package/generated_kept.py", "package/kept.log"}
    assert taken(tmp_path) == {"model.py", "linked.py", *kept}
    assert taken(tmp_path, include=("*.py",)) == {
        "model.py",
        "linked.py",
        "package/generated_kept.py",
    }
    assert taken(tmp_path, exclude=("package/*", "!package/kept.log")) == {
        "model.py",
        "linked.py",
        "package/kept.log",
    }
    (tmp_path / ".git").mkdir()  # its rules concern the folders below, too
    make(tmp_path, {"package/trace.log": ""})
    assert "trace.log" not in taken(tmp_path / "package")


def test_equal_files_make_equal_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"model.py": "x = 1", "package/data.py": "y = 2"}
    make(tmp_path / "one", files)
    make(tmp_path / "two", dict(reversed(files.items())))
    os.utime(tmp_path / "two/model.py", (1, 1))
    (tmp_path / "two/model.py").chmod(0o700)
    expected = bundle_of(CodeSpec(path=str(tmp_path / "one")))
    assert bundle_of(CodeSpec(path=str(tmp_path / "two"))) == expected
    monkeypatch.chdir(tmp_path / "two")
    assert bundle_of(CodeSpec(path=".")) == expected


def test_what_is_too_much_is_named(tmp_path: Path) -> None:
    make(tmp_path, {"model.py": "x = 1", **{f"{n}.py": "" for n in range(10)}})
    for number in range(6):
        with (tmp_path / f"weights{number}.bin").open("wb") as file:
            file.truncate((3 + number) << 40)  # no such file is read
    with pytest.raises(LimitError) as caught:
        bundle_of(CodeSpec(path=str(tmp_path)))
    text = str(caught.value)
    assert "17 files with 36,283,883,716,613 bytes" in text
    assert "largest: weights5.bin (8,796,093,022,208 bytes), weights4.bin" in text
    assert "weights1.bin" in text
    assert "weights0.bin" not in text
    assert taken(tmp_path, exclude=("*.bin",)) >= {"model.py"}


def test_folders_that_cannot_be_sent_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"code\.path: .*missing is not a folder"):
        bundle_of(CodeSpec(path=str(tmp_path / "missing")))
    with pytest.raises(InvalidInputError, match="has no file"):
        bundle_of(CodeSpec(path=str(tmp_path)))
    make(tmp_path, {"Model.py": "", "model.py": ""})
    with pytest.raises(InvalidInputError, match="some systems"):
        bundle_of(CodeSpec(path=str(tmp_path)))

"""Leaves appear whole under their digest, and a state is read with every byte checked."""

import hashlib
from pathlib import Path

import pytest

from stratagem.common.base.errors import IntegrityError, NotFoundError, UnavailableError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import StateFolder, digest_and_upload

CONTENT = b"of a leaf"
DIGEST = Digest(hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    made = StateFolder(tmp_path)
    (tmp_path / "leaves" / DIGEST[:2]).mkdir(parents=True)
    made.temporary.mkdir()
    return made


def write(folder: StateFolder, upload: str, content: bytes = CONTENT) -> None:
    folder.write_leaf(DIGEST, upload, [memoryview(content[:4]), memoryview(content[4:])])


def test_a_leaf_is_there_under_its_digest_behind_a_damaged_copy(folder: StateFolder) -> None:
    write(folder, "1-a")
    (path,) = folder.copies(DIGEST)
    assert digest_and_upload(path.name) == (DIGEST, "1-a")
    assert folder.read_leaf(DIGEST) == CONTENT
    assert list(folder.temporary.iterdir()) == []
    write(folder, "1-a")
    write(folder, "1-b", b"other bytes")
    assert folder.read_leaf(DIGEST) == CONTENT
    (_, older) = folder.copies(DIGEST)
    older.unlink()
    with pytest.raises(IntegrityError, match="damaged"):
        folder.read_leaf(DIGEST)


def test_what_is_not_there_or_has_other_bytes_is_told(folder: StateFolder) -> None:
    with pytest.raises(NotFoundError):
        folder.read_leaf(DIGEST)
    assert folder.read_list(DIGEST) is None
    assert folder.store_id() == ""
    path = folder.lists / DIGEST[:2] / f"{DIGEST}.leaves"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something else")
    with pytest.raises(IntegrityError, match="other bytes"):
        folder.read_list(DIGEST)


def test_a_folder_that_is_gone_says_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"cannot be written below .*: No such file"):
        write(StateFolder(tmp_path), "1-a")
    assert list(tmp_path.iterdir()) == []

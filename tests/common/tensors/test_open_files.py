"""What one process reads of a file that another one has open."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.errors import IntegrityError
from stratagem.common.tensors import local_files
from stratagem.common.tensors.local_files import (
    MemoryCopy,
    UnreadableFileError,
    contents,
    copy_of,
    is_near,
    leave_place,
    offer,
    offered,
    opened,
    opened_copy,
    place,
    readable_copy,
)
from stratagem.common.tensors.stream import crc32c
from stratagem.v1 import tensor_pb2, worker_pb2

PIECE = 2**16
DATA = bytes(range(251)) * 1000


def read(file: tensor_pb2.OpenFile, name: str, total_bytes: int) -> bytes:
    found = opened(file, name)
    assert found is not None
    return b"".join(map(bytes, contents(found, file, total_bytes)))


@pytest.mark.parametrize("size", [0, 1, 7, 2**18, 2**18 + 1, 3 * 2**18 - 1])
def test_a_copy_of_several_buffers_is_read_whole(size: int) -> None:
    data = (DATA * 4)[:size]
    copy = MemoryCopy(
        [memoryview(data)[: size // 3], memoryview(b""), memoryview(data)[size // 3 :]]
    )
    pieces = readable_copy(copy.offer(), size)
    assert pieces is not None
    assert b"".join(map(bytes, pieces)) == data
    copy.close()


def file_of(path: Path, sums: list[int], start: int = 0) -> tuple[int, tensor_pb2.OpenFile]:
    descriptor = os.open(path, os.O_RDONLY)
    return descriptor, offer(descriptor, start, PIECE, sums)


def test_every_piece_of_a_file_is_compared_with_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"head" + DATA)
    sums = [crc32c(DATA[at : at + PIECE]) for at in range(0, len(DATA), PIECE)]
    descriptor, file = file_of(path, sums, start=4)
    assert read(file, "state", len(DATA)) == DATA
    path.write_bytes(b"head" + DATA[:PIECE] + b"?" + DATA[PIECE + 1 :])
    found = opened(file, "state")
    assert found is not None
    pieces = contents(found, file, len(DATA))
    assert bytes(next(pieces)) == DATA[:PIECE]
    with pytest.raises(IntegrityError, match=f"other bytes from {PIECE} on"):
        next(pieces)
    os.close(descriptor)


@pytest.mark.parametrize("wrong", ["too short", "too few sums", "small pieces"])
def test_a_file_that_is_not_what_was_offered_is_refused(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(DATA[: -1 if wrong == "too short" else None])
    sums = [crc32c(DATA[at : at + PIECE]) for at in range(0, len(DATA), PIECE)]
    descriptor, file = file_of(path, sums[:1] if wrong == "too few sums" else sums)
    if wrong == "small pieces":
        file.piece_bytes = 1
    with pytest.raises(IntegrityError):
        read(file, "state", len(DATA))
    os.close(descriptor)


def test_no_file_of_another_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(DATA)
    descriptor, file = file_of(path, [])
    with pytest.raises(IntegrityError, match="is no state"):
        opened(file, "state")
    for name in ("", "secret", "stratagem-snapshot-", f"stratagem-snapshot-{'0' * 32}/../secret"):
        file.name = name
        with pytest.raises(IntegrityError, match="is no copy of a snapshot"):
            opened_copy(file)
    of_this_name = tmp_path / f"stratagem-snapshot-{'0' * 32}"
    of_this_name.write_bytes(DATA)
    on_disk, named = file_of(of_this_name, [])
    named.name = of_this_name.name
    with pytest.raises(IntegrityError, match="that is not in memory"):
        opened_copy(named)
    os.close(on_disk)
    file.name = f"stratagem-snapshot-{'0' * 32}"
    with pytest.raises(IntegrityError, match="is no stratagem-snapshot-0"):
        opened_copy(file)
    os.close(descriptor)
    assert opened_copy(file) is None, "it is closed"
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IntegrityError):
        opened(offer(folder), tmp_path.name)
    os.close(folder)


def test_a_descriptor_that_is_used_again_is_not_taken_for_the_copy_before() -> None:
    """A result that is told again may name a copy that has been closed since."""
    first = MemoryCopy([memoryview(b"first")])
    offer_of_first = first.offer()
    first.close()
    second = MemoryCopy([memoryview(b"other")])
    assert second.offer().descriptor == offer_of_first.descriptor
    with pytest.raises(IntegrityError, match="an open file was offered that is no stratagem"):
        opened_copy(offer_of_first)
    assert readable_copy(offer_of_first, 5) is None
    second.close()


def test_files_of_another_place_are_not_offered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = worker_pb2.GetStateResponse(file=tensor_pb2.OpenFile(place=place(), process=1))
    assert offered(here) == here.file
    elsewhere = worker_pb2.GetStateResponse(file=tensor_pb2.OpenFile(place="elsewhere"))
    assert offered(elsewhere) is None
    assert offered(worker_pb2.GetStateResponse()) is None
    assert offered(worker_pb2.GetGradientsRequest()) is None, "it has no such field"
    monkeypatch.setattr(local_files._Place, "name", place())  # put back behind the test
    leave_place()
    assert offered(here) is None
    assert not is_near("")
    # In a namespace of processes whose /proc belongs to another one.
    monkeypatch.setattr(local_files._Place, "name", None)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert place() == ""


def test_a_kernel_that_opens_no_such_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = MemoryCopy([memoryview(b"1234567")])

    def forbidden(*_: Any, **__: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(UnreadableFileError, match="Permission denied"):
        opened_copy(copy.offer())
    copy.close()

    def refused(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert copy_of([memoryview(b"1234567")]) is None

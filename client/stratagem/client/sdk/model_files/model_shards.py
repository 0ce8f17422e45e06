"""A model divided among several safetensors files, as Hugging Face and torch.distributed.checkpoint
read them: which tensor is in which file, and the index that says so."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.tensors.manifest import TensorSpec

INDEX_NAME: Final = "model.safetensors.index.json"
_LARGEST: Final = 99_999
"""Of the numbers in names of files, which have five digits."""

Shards = Sequence[Sequence[TensorSpec]]


def shards_of(tensors: Sequence[TensorSpec], shard_bytes: int | None) -> Shards:
    """Divide tensors, in their order, among files of at most shard_bytes of data each.

    A tensor is never cut: a larger one has a file of its own. None: one file for all. Raises
    InvalidInputError where they would be more files than their names can number.
    """
    shards: list[list[TensorSpec]] = []
    room = 0
    for tensor in tensors:
        if not shards or (shard_bytes is not None and tensor.size_bytes > room and shards[-1]):
            shards.append([])
            room = shard_bytes or 0
        shards[-1].append(tensor)
        room -= tensor.size_bytes
    if len(shards) > _LARGEST:
        text = f"{shard_bytes} bytes make {len(shards)} files; the limit is {_LARGEST}"
        raise InvalidInputError.at("shard_size", text)
    return shards


def shard_name(number: int, num_shards: int) -> str:
    """Return the name of a file; number: from 0 on."""
    return f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"


def index_text(shards: Shards) -> str:
    """Return the index of the files as JSON: where each tensor is, and how many bytes all have."""
    names = [shard_name(number, len(shards)) for number in range(len(shards))]
    total = sum(tensor.size_bytes for shard in shards for tensor in shard)
    weight_map = {
        tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
    }
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


class ShardFolder:
    """A folder of files that is being written. One file is open at a time, so any number may be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[int, BinaryIO] | None = None
        self._names: Sequence[str] = ()

    def begin(self, shards: Shards) -> None:
        """Write the index; the files follow."""
        self._names = [shard_name(number, len(shards)) for number in range(len(shards))]
        for name in self._names:
            (self._folder / name).touch()
        (self._folder / INDEX_NAME).write_text(index_text(shards) + "\n", encoding="utf-8")

    def write(self, number: int, place: int, data: bytes | memoryview) -> None:
        """Write into the file of this number, from this byte on."""
        if self._open is None or self._open[0] != number:
            self.close()
            self._open = number, (self._folder / self._names[number]).open("r+b")
        file = self._open[1]
        file.seek(place)
        file.write(data)

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def sync(self) -> None:
        """Return when all of it is on the disk."""
        self.close()
        for path in (*self._folder.iterdir(), self._folder):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def whole_folder(path: Path) -> Iterator[ShardFolder]:
    """A folder of files that is at `path` when the block ends well; else nothing has changed.

    Raises InvalidInputError where something is there already, OSError that names `path`.
    """
    if path.exists():
        text = f"{path} is there already; nothing was written"
        raise InvalidInputError.at("path", text)
    part = path.absolute().with_name(f".{path.absolute().name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process of this number that was killed
    try:
        part.mkdir()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        files = ShardFolder(part)
        try:
            yield files
            files.sync()
        finally:
            files.close()
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)

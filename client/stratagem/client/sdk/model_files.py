"""Write a committed model as plain safetensors files, in one file or divided among several."""

import json
import os
import shutil
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import (
    NUM_AVERAGED_KEY,
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
)

# ---- Shards ----
#
# The files and their index follow the format that Hugging Face and torch.distributed.checkpoint
# read; the index says which tensor is in which file.

INDEX_NAME: Final = "model.safetensors.index.json"
_LARGEST: Final = 99_999
"""The largest number of a file, because names have five digits for it."""

Shards = Sequence[Sequence[TensorSpec]]


def shards_of(tensors: Sequence[TensorSpec], shard_bytes: int | None) -> Shards:
    """Divide tensors, in order, among files of at most shard_bytes of data each; None: one file.

    No tensor is split: a larger one has a file of its own. Raises InvalidInputError if there would
    be more than 99,999 files.
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
    """Return the name of a model file; `number` begins with 0."""
    return f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"


def index_text(shards: Shards) -> str:
    """Return the index of the model files as JSON: the file of each tensor, and the total size."""
    names = [shard_name(number, len(shards)) for number in range(len(shards))]
    total = sum(tensor.size_bytes for shard in shards for tensor in shard)
    weight_map = {
        tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
    }
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


class ShardFolder:
    """A folder of model files being written. One file is open at a time, so there may be many."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[int, BinaryIO] | None = None
        self._names: Sequence[str] = ()

    def begin(self, shards: Shards) -> None:
        """Write the index, and create the empty files."""
        self._names = [shard_name(number, len(shards)) for number in range(len(shards))]
        for name in self._names:
            (self._folder / name).touch()
        (self._folder / INDEX_NAME).write_text(index_text(shards) + "\n", encoding="utf-8")

    def write(self, number: int, place: int, data: bytes | memoryview) -> None:
        """Write data into the file of this number, at this byte offset."""
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
        """Flush all files and the folder to disk."""
        self.close()
        for path in (*self._folder.iterdir(), self._folder):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def whole_folder(path: Path) -> Iterator[ShardFolder]:
    """Context manager that yields a new folder, which appears at `path` if the block has no error.

    Raises InvalidInputError if `path` exists, and OSError that names `path`.
    """
    if path.exists():
        text = f"{path} exists already; nothing was written"
        raise InvalidInputError.at("path", text)
    part = path.absolute().with_name(f".{path.absolute().name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed process with this id
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


# ---- Plain model ----
#
# Any reader of safetensors loads these files, which have all names of the model and nothing else.
#
# A state's own file has tied tensors once, and the optimizer's with the model's; see
# downloads.py. Here every name of the model's state_dict() has bytes of its own, as safetensors
# requires. The model may also be that of averaged parameters, where a run keeps their average.

MODEL_PREFIX: Final = "model/"
AVERAGE_PREFIX: Final = "average/"
AVERAGE: Final = "average"
"""The name by which callers ask for the averaged parameters instead of a state."""
_FORMAT: Final = {"format": "pt"}
"""The metadata that marks torch tensors in safetensors files."""


class PlainModel:
    """A sink for the bytes of a whole state that writes those of the model to plain files."""

    def __init__(
        self,
        manifest: Manifest,
        write: Callable[[int, int, bytes | memoryview], None],
        which: str = "final",
        *,
        shard_bytes: int | None = None,
        begin: Callable[[Shards], None] = lambda _: None,
    ) -> None:
        """Write the headers of the files. write: writes bytes to the file of a number at an offset;
        begin: is called first, with the tensors of each file. Raises InvalidInputError for a state
        without a model, or without the average that is wanted."""
        specs = [spec for spec in manifest.tensors if spec.name.startswith(MODEL_PREFIX)]
        if not specs:
            raise InvalidInputError.at("plain", "there is no model in this file of the run")
        means = means_of(manifest) if which == AVERAGE else {}
        plain = _plain([replace(spec, name=spec.name.removeprefix(MODEL_PREFIX)) for spec in specs])
        shards = shards_of(plain.tensors, shard_bytes)
        begin(shards)
        self._write = write
        self._stored = [spec for spec in manifest.stored() if spec.size_bytes]
        self._starts = [spec.offset for spec in self._stored]
        self._places: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        sources = iter(specs)
        for number, shard in enumerate(shards):
            part = _plain(shard)
            header = header_bytes(part)
            write(number, 0, header)
            for target, source in zip(part.tensors, sources, strict=False):
                name = means.get(source.name, source.alias_of or source.name)
                self._places[name].append((number, len(header) + target.offset))

    def write(self, offset: int, data: bytes) -> None:
        """Write data that begins at this byte offset of the state."""
        rest = memoryview(data)
        while rest:
            tensor = self._stored[bisect_right(self._starts, offset) - 1]
            within = offset - tensor.offset
            piece = rest[: tensor.size_bytes - within]
            for number, place in self._places[tensor.name]:
                self._write(number, place + within, piece)
            offset, rest = offset + len(piece), rest[len(piece) :]


def _plain(specs: Iterable[TensorSpec]) -> Manifest:
    named = [(spec.name, spec.dtype, spec.shape) for spec in specs]
    return build_manifest(named, Purpose.STATE, metadata=_FORMAT)


def means_of(manifest: Manifest) -> dict[str, str]:
    """Return the name of the averaged tensor for each of the model's tensors, tied ones included.

    Empty if the model's parameters are themselves averages. Raises InvalidInputError for a state
    without an average.
    """
    first = {spec.name: spec.alias_of or spec.name for spec in manifest.tensors}
    means = {
        first[f"{MODEL_PREFIX}{spec.name.removeprefix(AVERAGE_PREFIX)}"]: spec.name
        for spec in manifest.tensors
        if spec.name.startswith(AVERAGE_PREFIX)
    }
    if not means and NUM_AVERAGED_KEY in manifest.metadata:
        return {}
    if not means:
        text = "the state has no average: it is kept from weight_average.start_step on, if at all"
        raise InvalidInputError.at("which", text)
    names = [name for name in first if name.startswith(MODEL_PREFIX)]
    return {name: means[first[name]] for name in names if first[name] in means}

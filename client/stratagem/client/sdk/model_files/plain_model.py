"""A committed model as files that any reader of safetensors loads: all names, and nothing else.

A state's own file has tied tensors once, and the optimizer's with the model's; see downloads.py.
Here every name of the model's state_dict() has bytes of its own, as safetensors wants it. The model
may also be the one of averaged parameters, where a run keeps their average; and it may be divided
among several files, see model_shards.py.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from stratagem.client.sdk.model_files.model_shards import Shards, shards_of
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import (
    NUM_AVERAGED_KEY,
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
)

MODEL_PREFIX: Final = "model/"
AVERAGE_PREFIX: Final = "average/"
AVERAGE: Final = "average"
"""What a caller names the model of averaged parameters by, instead of a state."""
_FORMAT: Final = {"format": "pt"}
"""What others look for in files whose tensors are torch's."""


class PlainModel:
    """Takes the bytes of a state as they come, and puts those of its model where they belong."""

    def __init__(
        self,
        manifest: Manifest,
        write: Callable[[int, int, bytes | memoryview], None],
        which: str = "final",
        *,
        shard_bytes: int | None = None,
        begin: Callable[[Shards], None] = lambda _: None,
    ) -> None:
        """Writes the headers. write: puts bytes into the file of a number, from a byte on; begin:
        is told of the files before that. Raises InvalidInputError for a state without a model, or
        without an average if that is wanted."""
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
        """data: of the state, from this byte on."""
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
    """Return the names of the averaged tensors by those of the model's, tied ones too.

    None where averages stand in the place of the parameters. Raises InvalidInputError for a state
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

"""Merges the parts of a state that was divided among workers into one blob.

The blob has one form however the state was divided: tensors are ordered by element size, the
largest first so that each is aligned, and then by name. Parts are copied a piece at a time, so
memory does not grow with the model. Knows neither runs nor workers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stratagem.common.base.errors import InvalidInputError, LimitError, StratagemError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.manifest import (
    Limits,
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
    check,
    dtype_named,
)
from stratagem.coordinator.store.blobs.blob_store import StateWriter
from stratagem.coordinator.store.blobs.temporary_files import Scratch


class ContradictionError(StratagemError):
    """The parts do not make a state. The same parts never will."""


class MergeStoppedError(StratagemError):
    """The merge was asked to stop; nothing of it is left."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """The part of a state that one worker holds: the manifest of its tensors, and their bytes in
    that order."""

    manifest: Manifest
    data: Scratch


def merged_manifest(parts: Sequence[Manifest], limits: Limits) -> Manifest:
    """Return the manifest of the tensors of all parts; parts that share a metadata key must agree.

    Of tied tensors the first in that order has the bytes. Raises ContradictionError where two
    parts have the same tensor, contradict each other, or are too large together.
    """
    named: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    for part in parts:
        tied: dict[str, list[str]] = {}
        for spec in part.tensors:
            if spec.name in named:
                raise ContradictionError(f"two parts of the state have the tensor {spec.name!r}")
            named[spec.name] = spec
            tied.setdefault(spec.alias_of or spec.name, []).append(spec.name)
        for names in tied.values():
            aliases.update(dict.fromkeys(names, min(names)))
    try:
        return _checked(named, aliases, merged_metadata(parts), limits)
    except (InvalidInputError, LimitError) as error:
        raise ContradictionError(str(error)) from error


def _checked(
    named: Mapping[str, TensorSpec],
    aliases: Mapping[str, str],
    metadata: Mapping[str, str],
    limits: Limits,
) -> Manifest:
    def place(name: str) -> tuple[int, str]:
        return -dtype_named(named[name].dtype).item_bytes, name

    manifest = build_manifest(
        [(name, named[name].dtype, named[name].shape) for name in sorted(named, key=place)],
        Purpose.STATE,
        aliases={name: first for name, first in aliases.items() if name != first},
        metadata=metadata,
    )
    check(manifest, limits)
    return manifest


def merged_metadata(parts: Sequence[Manifest]) -> Mapping[str, str]:
    """Return the metadata of all parts. Raises ContradictionError where two differ."""
    merged: dict[str, str] = {}
    for part in parts:
        for key, value in part.metadata.items():
            if merged.setdefault(key, value) != value:
                raise ContradictionError(
                    f"two parts of the state differ in {key!r}: {merged[key]!r} and {value!r}"
                )
    return merged


def joined_rows(merged: Manifest) -> Manifest:
    """Describe tensors "<name>/<number>" as one "<name>" each, row after row: the same bytes.

    Raises ContradictionError where they differ in more than rows.
    """
    joined: dict[str, TensorSpec] = {}
    for spec in merged.stored():
        name, rows = spec.name.rpartition("/")[0], spec.shape[0] if spec.shape else 0
        before = joined.get(name)
        if before is None:
            joined[name] = TensorSpec(name, spec.dtype, spec.shape, 0, 0)
            continue
        if (before.dtype, before.shape[1:]) != (spec.dtype, spec.shape[1:]):
            text = f"{name!r} is {before.dtype} {before.shape} in one batch and {spec.dtype} "
            raise ContradictionError(f"{text}{spec.shape} in another")
        shape = (before.shape[0] + rows, *spec.shape[1:])
        joined[name] = TensorSpec(name, spec.dtype, shape, 0, 0)
    named = [(tensor.name, tensor.dtype, tensor.shape) for tensor in joined.values()]
    return build_manifest(named, Purpose.STATE, metadata=merged.metadata)


def write_merged(
    manifest: Manifest,
    parts: Sequence[StatePart],
    writer: StateWriter,
    sources: Mapping[str, Sequence[tuple[int, TensorSpec]]],
    should_stop: Callable[[], bool] = lambda: False,
) -> Digest:
    """Write and commit the data of a merged manifest. Raises MergeStoppedError when asked to stop.

    sources: of each tensor, in which parts its bytes are, in order.
    """
    for target in manifest.stored():
        for number, spec in sources[target.name]:
            for piece in parts[number].data.read(spec.offset, spec.size_bytes):
                if should_stop():
                    raise MergeStoppedError("the commit is no longer wanted")
                writer.write(piece)
    return writer.commit()

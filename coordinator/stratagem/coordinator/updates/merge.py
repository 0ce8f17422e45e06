"""Merge the parts of a state that was divided among workers into one blob.

The blob has one form however the state was divided: tensors are ordered by element size, the
largest first so that each is aligned, and then by name. Parts are copied a piece at a time, so
memory does not grow with the model. The module depends on neither runs nor workers.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from stratagem.common.base.errors import InvalidInputError, LimitError, StratagemError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import leaves_of
from stratagem.common.tensors.manifest import (
    Limits,
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
    check,
    dtype_named,
)
from stratagem.common.tensors.same_bytes import (
    ParameterSlice,
    SliceName,
    parameter_slice,
    slice_name,
)
from stratagem.coordinator.store.blobs import StateWriter
from stratagem.coordinator.store.files import Scratch

# ---- Parts ----


class ContradictionError(StratagemError):
    """The parts do not make a state. The same parts never will."""


class MergeStoppedError(StratagemError):
    """The merge was stopped because it was asked to; nothing that it wrote is left."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """The part of a state that one worker holds: its manifest, and its data in a scratch file."""

    manifest: Manifest
    data: Scratch


def merged_manifest(parts: Sequence[Manifest], limits: Limits) -> Manifest:
    """Return the manifest of the tensors of all parts; parts that share a metadata key must agree.

    The first of tied tensors owns the bytes. Raises ContradictionError if two parts have the same
    tensor, contradict each other, or are too large together.
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
    """Return the merged metadata of all parts. Raises ContradictionError if two parts differ."""
    merged: dict[str, str] = {}
    for part in parts:
        for key, value in part.metadata.items():
            if merged.setdefault(key, value) != value:
                raise ContradictionError(
                    f"two parts of the state differ in {key!r}: {merged[key]!r} and {value!r}"
                )
    return merged


def joined_rows(merged: Manifest) -> Manifest:
    """Return a manifest in which one tensor "<name>" joins all "<name>/<number>", row after row.

    Raises ContradictionError if they differ in more than the number of rows.
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
    """Write and commit the data of a merged manifest. Raises MergeStoppedError if asked to stop.

    sources: the parts that hold each tensor's bytes, in order.
    """
    for target in manifest.stored():
        for number, spec in sources[target.name]:
            for piece in parts[number].data.read(spec.offset, spec.size_bytes):
                if should_stop():
                    raise MergeStoppedError("the commit is no longer wanted")
                writer.write(piece)
    return writer.commit()


# ---- Slices ----
#
# Each member of a party may have a slice of a state, element by element. The merged blob is that
# of a state that was never divided: the same tensors, in the same order, with the same bytes.

_MODEL = "model/"
Sources = Mapping[str, Sequence[tuple[int, TensorSpec]]]
"""The parts with each tensor's bytes, keyed by name: (number of a part, tensor in it) in order."""


class WholeState(NamedTuple):
    """A state assembled from parts: its manifest, and where the parts have its tensors' bytes."""

    manifest: Manifest
    sources: Sources


def are_sliced(parts: Sequence[Manifest]) -> bool:
    """Return True if some part holds slices of tensors instead of whole ones."""
    return any(
        _name_of(spec) is not None or _parameter_of(spec) is not None
        for part in parts
        for spec in part.tensors
    )


def joined_slices(parts: Sequence[Manifest], limits: Limits) -> WholeState:
    """Assemble a state from slices; each tensor that is not sliced is in exactly one part.

    The order is that of an undivided state: the model, the optimizer, the rest. Raises
    ContradictionError if the parts make no whole, or it is too large.
    """
    plain: dict[str, tuple[int, TensorSpec]] = {}
    slices: dict[str, list[tuple[SliceName, int, TensorSpec]]] = {}
    parameters: dict[str, list[tuple[ParameterSlice, int, TensorSpec]]] = {}
    for number, part in enumerate(parts):
        for spec in part.tensors:
            name, of_parameter = _name_of(spec), _parameter_of(spec)
            if name is not None:
                slices.setdefault(name.whole, []).append((name, number, spec))
            elif of_parameter is not None:
                parameters.setdefault(of_parameter.whole, []).append((of_parameter, number, spec))
            elif spec.name in plain:
                raise ContradictionError(f"two parts of the state have the tensor {spec.name!r}")
            else:
                plain[spec.name] = (number, spec)
    specs = _model(plain, parameters)
    shapes = {spec.name: spec.shape for spec in specs}
    for whole in slices:
        slices[whole].sort(key=lambda piece: piece[0])
    ordered = sorted(slices, key=lambda whole: slices[whole][0][0])
    specs += [_joined(whole, slices[whole], shapes) for whole in ordered]
    specs += [spec for name, (_, spec) in plain.items() if not name.startswith(_MODEL)]
    specs.sort(key=lambda spec: -dtype_named(spec.dtype).item_bytes)
    try:
        manifest = build_manifest(
            [(spec.name, spec.dtype, spec.shape) for spec in specs],
            Purpose.STATE,
            aliases={spec.name: spec.alias_of for spec in specs if spec.alias_of is not None},
            metadata=merged_metadata(parts),
        )
        check(manifest, limits)
    except (InvalidInputError, LimitError) as error:
        raise ContradictionError(str(error)) from error
    sources: dict[str, list[tuple[int, TensorSpec]]] = {
        name: [place] for name, place in plain.items()
    }
    sources |= {whole: [(n, spec) for _, n, spec in pieces] for whole, pieces in slices.items()}
    sources |= {whole: [(n, spec) for _, n, spec in pieces] for whole, pieces in parameters.items()}
    return WholeState(manifest, sources)


def whole_of(parts: Sequence[Manifest], limits: Limits) -> WholeState:
    """Assemble a state from its parts, slice by slice or tensor by tensor. Raises
    ContradictionError if the parts make no state."""
    if are_sliced(parts):
        return joined_slices(parts, limits)
    sources = {spec.name: [(n, spec)] for n, part in enumerate(parts) for spec in part.tensors}
    return WholeState(merged_manifest(parts, limits), sources)


def _model(
    plain: Mapping[str, tuple[int, TensorSpec]],
    parameters: Mapping[str, list[tuple[ParameterSlice, int, TensorSpec]]],
) -> list[TensorSpec]:
    """Return the tensors of the model in order: sliced parameters at their recorded places, and
    whole tensors in between."""
    placed: dict[int, TensorSpec] = {}
    for whole, slices in parameters.items():
        slices.sort(key=lambda piece: piece[0])
        name, _, spec = slices[0]
        if (
            whole in plain
            or name.place in placed
            or {(e.place, e.shape) for e, *_ in slices} != {(name.place, name.shape)}
        ):
            raise ContradictionError(f"the slices of {whole!r} contradict other tensors")
        _check_slices(whole, [(e.first, spec) for e, _, spec in slices], name.shape)
        tied = None if spec.alias_of is None else parameter_slice(spec.alias_of)
        alias_of = None if tied is None else tied.whole
        placed[name.place] = TensorSpec(whole, spec.dtype, name.shape, 0, 0, alias_of=alias_of)
    rest = iter([spec for name, (_, spec) in plain.items() if name.startswith(_MODEL)])
    specs: list[TensorSpec] = []
    for place in sorted(placed):
        specs += islice(rest, place - len(specs))
        if len(specs) != place:
            text = f"{placed[place].name!r} is tensor {place} of the model"
            raise ContradictionError(f"{text}, but only {len(specs)} of those before it are here")
        specs.append(placed[place])
    return [*specs, *rest]


def _check_slices(
    whole: str, slices: Sequence[tuple[int, TensorSpec]], shape: tuple[int, ...]
) -> None:
    """Raise ContradictionError unless the slices join without gaps to a tensor of this shape."""
    at, dtype = 0, slices[0][1].dtype
    for first, spec in slices:
        if first != at or spec.dtype != dtype:
            text = f"a slice of {whole!r} is {spec.dtype} from {first}"
            raise ContradictionError(f"{text}, after {dtype} up to {at}")
        at += math.prod(spec.shape)
    if at != math.prod(shape):
        raise ContradictionError(f"the slices of {whole!r} have {at} elements, not {shape}")


def _joined(
    whole: str,
    slices: Sequence[tuple[SliceName, int, TensorSpec]],
    shapes: Mapping[str, tuple[int, ...]],
) -> TensorSpec:
    """Return the tensor that slices make: a single number, or a tensor of the parameter's shape."""
    first = slices[0][2]
    if len(slices) == 1 and not first.shape:
        return TensorSpec(whole, first.dtype, (), 0, 0)
    parameter = whole.partition("/")[2].rpartition("/")[0]
    shape = shapes.get(f"{_MODEL}{parameter}")
    if shape is None:
        raise ContradictionError(f"{whole!r} belongs to no tensor of the model")
    _check_slices(whole, [(name.first, spec) for name, _, spec in slices], shape)
    return TensorSpec(whole, first.dtype, shape, 0, 0)


def _name_of(spec: TensorSpec) -> SliceName | None:
    try:
        return slice_name(spec.name)
    except InvalidInputError as error:
        raise ContradictionError(str(error)) from error


def _parameter_of(spec: TensorSpec) -> ParameterSlice | None:
    try:
        return parameter_slice(spec.name)
    except InvalidInputError as error:
        raise ContradictionError(str(error)) from error


# ---- Pieces of leaves ----
#
# This section determines of which pieces of parts each leaf of a divided state is made, and who
# writes which leaf. Parts and writers are numbers here.


class PartPiece(NamedTuple):
    """A range of bytes in one part of a state."""

    part: int
    offset: int
    size: int


PiecedLeaf = tuple[PartPiece, ...]
"""The pieces whose bytes, in order, make up a leaf."""


class _Placed(NamedTuple):
    """A range of bytes of a state: its start in the state, and the piece of a part with the
    bytes."""

    start: int
    piece: PartPiece


def pieced_leaves(
    whole: Manifest, sources: Mapping[str, Sequence[tuple[int, TensorSpec]]]
) -> list[PiecedLeaf]:
    """Return the pieces that make up each leaf of a state. sources: see Sources."""
    placed: list[_Placed] = []
    for target in whole.stored():
        at = target.offset
        for part, spec in sources[target.name]:
            if spec.size_bytes:
                placed.append(_Placed(at, PartPiece(part, spec.offset, spec.size_bytes)))
                at += spec.size_bytes
    starts = [piece.start for piece in placed]
    pieced = []
    for leaf in leaves_of(whole):
        pieces: list[PartPiece] = []
        for offset, size in leaf.ranges:
            _add_range(pieces, placed, bisect_right(starts, offset) - 1, offset, size)
        pieced.append(tuple(pieces))
    return pieced


def _add_range(
    pieces: list[PartPiece], placed: Sequence[_Placed], at: int, offset: int, size: int
) -> None:
    while size:
        start, piece = placed[at]
        begin = offset - start
        num_bytes = min(size, piece.size - begin)
        part, first = piece.part, piece.offset + begin
        last = pieces[-1] if pieces else None
        if last is not None and (last.part, last.offset + last.size) == (part, first):
            pieces[-1] = last._replace(size=last.size + num_bytes)
        else:
            pieces.append(PartPiece(part, first, num_bytes))
        offset, size, at = offset + num_bytes, size - num_bytes, at + 1


def shared_out(
    leaves: Mapping[int, PiecedLeaf], parts_of: Sequence[Collection[int]]
) -> list[list[int]]:
    """Divide leaves among writers: about equal bytes for each writer, and within that as many bytes
    as possible that the writer has itself.

    parts_of: the parts that each writer holds. Return the numbers of each writer's leaves.
    """
    sizes = {number: sum(piece.size for piece in leaf) for number, leaf in leaves.items()}
    quota = sum(sizes.values()) / len(parts_of)
    loads, shares = [0] * len(parts_of), [list[int]() for _ in parts_of]
    for number, leaf in leaves.items():
        by_part: dict[int, int] = {}
        for piece in leaf:
            by_part[piece.part] = by_part.get(piece.part, 0) + piece.size
        here = [sum(by_part.get(part, 0) for part in parts) for parts in parts_of]
        places = [_place(loads[n], sizes[number], quota, here[n]) for n in range(len(loads))]
        writer = places.index(min(places))
        shares[writer].append(number)
        loads[writer] += sizes[number]
    return shares


def _place(load: int, size: int, quota: float, here: int) -> tuple[bool, int, int]:
    """Return the sort key of a writer for a leaf; the least is best. Writers with room come first,
    sorted by the bytes of the leaf that they hold, then the rest, sorted by load."""
    is_full = load + size / 2 > quota
    return is_full, load if is_full else -here, load

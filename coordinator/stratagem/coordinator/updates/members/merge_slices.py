"""Puts together a state of which each member of a party has a slice, element by element.

The blob is that of a state that was never divided: the same tensors, in the same order, with the
same bytes. Knows neither runs nor workers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stratagem.common.base.errors import InvalidInputError, LimitError
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.manifest import (
    Limits,
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
    check,
)
from stratagem.common.tensors.state_slices import SliceName, slice_name
from stratagem.coordinator.updates.members.merge_parts import (
    ContradictionError,
    merged_manifest,
    merged_metadata,
)

_MODEL = "model/"
Sources = Mapping[str, Sequence[tuple[int, TensorSpec]]]
"""By tensor of the whole: in which part, and where there, its bytes are, in order."""


class WholeState(NamedTuple):
    """A state that was put together: its manifest, and where the bytes of its tensors are."""

    manifest: Manifest
    sources: Sources


def are_sliced(parts: Sequence[Manifest]) -> bool:
    """Return whether the members hold slices of tensors."""
    return any(_name_of(spec) is not None for part in parts for spec in part.tensors)


def joined_slices(parts: Sequence[Manifest], limits: Limits) -> WholeState:
    """Return the state whose slices are in these parts; what is not sliced is in one of them.

    It is ordered as a state that one member holds: the model, the optimizer, the rest. Raises
    ContradictionError where the parts make no whole, or it is too large.
    """
    plain: dict[str, tuple[int, TensorSpec]] = {}
    slices: dict[str, list[tuple[SliceName, int, TensorSpec]]] = {}
    for number, part in enumerate(parts):
        for spec in part.tensors:
            name = _name_of(spec)
            if name is not None:
                slices.setdefault(name.whole, []).append((name, number, spec))
            elif spec.name in plain:
                raise ContradictionError(f"two parts of the state have the tensor {spec.name!r}")
            else:
                plain[spec.name] = (number, spec)
    shapes = {name: spec.shape for name, (_, spec) in plain.items() if name.startswith(_MODEL)}
    for whole in slices:
        slices[whole].sort(key=lambda each: each[0])
    ordered = sorted(slices, key=lambda whole: slices[whole][0][0])
    specs = [spec for name, (_, spec) in plain.items() if name.startswith(_MODEL)]
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
    sources |= {whole: [(n, spec) for _, n, spec in each] for whole, each in slices.items()}
    return WholeState(manifest, sources)


def whole_of(parts: Sequence[Manifest], limits: Limits) -> WholeState:
    """Return the state that parts make, slice by slice or tensor by tensor. Raises
    ContradictionError where they make none."""
    if are_sliced(parts):
        return joined_slices(parts, limits)
    sources = {spec.name: [(n, spec)] for n, part in enumerate(parts) for spec in part.tensors}
    return WholeState(merged_manifest(parts, limits), sources)


def _joined(
    whole: str,
    slices: Sequence[tuple[SliceName, int, TensorSpec]],
    shapes: Mapping[str, tuple[int, ...]],
) -> TensorSpec:
    """Describe the tensor that slices make: one number, or as many as the parameter has."""
    first = slices[0][2]
    if len(slices) == 1 and not first.shape:
        return TensorSpec(whole, first.dtype, (), 0, 0)
    parameter = whole.partition("/")[2].rpartition("/")[0]
    shape = shapes.get(f"{_MODEL}{parameter}")
    if shape is None:
        raise ContradictionError(f"{whole!r} belongs to no tensor of the model")
    at = 0
    for name, _, spec in slices:
        if name.first != at or spec.dtype != first.dtype:
            text = f"a slice of {whole!r} is {spec.dtype} from {name.first}"
            raise ContradictionError(f"{text}, after {first.dtype} up to {at}")
        at += math.prod(spec.shape)
    if at != math.prod(shape):
        raise ContradictionError(f"the slices of {whole!r} have {at} elements, not {shape}")
    return TensorSpec(whole, first.dtype, shape, 0, 0)


def _name_of(spec: TensorSpec) -> SliceName | None:
    try:
        return slice_name(spec.name)
    except InvalidInputError as error:
        raise ContradictionError(str(error)) from error

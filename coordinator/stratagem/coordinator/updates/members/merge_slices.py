"""Puts together a state of which each member of a party has a slice, element by element.

The blob is that of a state that was never divided: the same tensors, in the same order, with the
same bytes. Knows neither runs nor workers.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from stratagem.common.base.errors import InvalidInputError, LimitError
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
    return any(
        _name_of(spec) is not None or _parameter_of(spec) is not None
        for part in parts
        for spec in part.tensors
    )


def joined_slices(parts: Sequence[Manifest], limits: Limits) -> WholeState:
    """Return the state whose slices are in these parts; what is not sliced is in one of them.

    It is ordered as a state that one member holds: the model, the optimizer, the rest. Raises
    ContradictionError where the parts make no whole, or it is too large.
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
        slices[whole].sort(key=lambda each: each[0])
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
    sources |= {whole: [(n, spec) for _, n, spec in each] for whole, each in slices.items()}
    sources |= {whole: [(n, spec) for _, n, spec in each] for whole, each in parameters.items()}
    return WholeState(manifest, sources)


def whole_of(parts: Sequence[Manifest], limits: Limits) -> WholeState:
    """Return the state that parts make, slice by slice or tensor by tensor. Raises
    ContradictionError where they make none."""
    if are_sliced(parts):
        return joined_slices(parts, limits)
    sources = {spec.name: [(n, spec)] for n, part in enumerate(parts) for spec in part.tensors}
    return WholeState(merged_manifest(parts, limits), sources)


def _model(
    plain: Mapping[str, tuple[int, TensorSpec]],
    parameters: Mapping[str, list[tuple[ParameterSlice, int, TensorSpec]]],
) -> list[TensorSpec]:
    """Describe the tensors of the model in order: parameters of which each member has a slice have
    their places, and what one member has stands between them."""
    placed: dict[int, TensorSpec] = {}
    for whole, found in parameters.items():
        found.sort(key=lambda each: each[0])
        name, _, spec = found[0]
        if (
            whole in plain
            or name.place in placed
            or {(e.place, e.shape) for e, *_ in found} != {(name.place, name.shape)}
        ):
            raise ContradictionError(f"the slices of {whole!r} contradict other tensors")
        _check_slices(whole, [(e.first, spec) for e, _, spec in found], name.shape)
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
    """Raise ContradictionError unless slices, each after the one before, make the whole."""
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
    """Describe the tensor that slices make: one number, or as many as the parameter has."""
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

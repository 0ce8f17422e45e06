"""Slices of a state become the blob of the undivided state, wherever it was cut."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, Limits, Manifest, Purpose
from stratagem.common.tensors.same_bytes import (
    ParameterSlice,
    SliceName,
    parameter_slice,
    slice_name,
)
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.coordinator.updates.merge import ContradictionError, are_sliced, joined_slices

SHARED = torch.randn(3, 4)
MODEL = {
    "model/b.weight": SHARED,
    "model/tied": SHARED,
    "model/a": torch.randn(7).to(torch.bfloat16),
    "model/a.scale": torch.tensor(2.0),
    "model/count": torch.tensor(3),
}
MOMENTS = {
    "optimizer/b.weight/step": torch.tensor(4.0),
    "optimizer/b.weight/exp_avg": torch.randn(3, 4),
    "optimizer/a/step": torch.tensor(4.0),
    "optimizer/a/exp_avg": torch.randn(7).to(torch.bfloat16),
    "optimizer/a.scale/step": torch.tensor(5.0),
    "optimizer/a.scale/exp_avg": torch.tensor(0.25),
}
AVERAGE = {"average/a": torch.randn(7).to(torch.bfloat16)}
ORDER = ["b.weight", "a", "a.scale"]
METADATA = {"step": "4", "format": "1"}
Part = tuple[Manifest, bytes]


def part_of(tensors: Mapping[str, Tensor], **metadata: str) -> Part:
    texts = {**METADATA, **metadata}
    manifest, buffers = manifest_of(tensors, Purpose.STATE, metadata=texts)
    return manifest, b"".join(bytes(buffer) for buffer in buffers)


def slices(name: str, first: int, stop: int) -> dict[str, Tensor]:
    """What the owner of these elements of a parameter holds."""
    number, found = ORDER.index(name), {}
    for place, key in enumerate(("step", "exp_avg")):
        full = f"optimizer/{name}/{key}"
        whole = MOMENTS[full]
        is_number = key == "step"
        if is_number and first:
            continue
        value = whole if is_number else whole.reshape(-1)[first:stop].clone()
        found[str(SliceName(number, place, first, full))] = value
    return found


def parameter(name: str, first: int, stop: int) -> dict[str, Tensor]:
    """What the owner of these elements of a parameter holds of it; tied ones under each name."""
    whole = MODEL[f"model/{name}"]
    part = whole.reshape(-1)[first:stop].clone()
    names = [full for full, tensor in MODEL.items() if tensor is whole]
    places = [(list(MODEL).index(full), full) for full in names]
    return {str(ParameterSlice(n, first, tuple(whole.shape), full)): part for n, full in places}


def joined(parts: list[Part], limits: Limits = DEFAULT_LIMITS) -> tuple[str, list[str]]:
    """(digest, names) of the blob."""
    whole = joined_slices([manifest for manifest, _ in parts], limits)
    pieces = [
        parts[number][1][spec.offset : spec.offset + spec.size_bytes]
        for target in whole.manifest.stored()
        for number, spec in whole.sources[target.name]
    ]
    return blob_digest(whole.manifest, pieces), [spec.name for spec in whole.manifest.tensors]


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 12), max_size=3),
    st.lists(st.integers(0, 7), max_size=3),
    st.booleans(),
)
def test_the_blob_is_that_of_an_undivided_state(
    size: int, ends_of_b: list[int], ends_of_a: list[int], is_full: bool
) -> None:
    """is_full: parameters are divided, too, and what all have stands between them."""
    manifest, data = part_of({**MODEL, **MOMENTS, **AVERAGE})
    held: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for name, ends, numel in (("b.weight", ends_of_b, 12), ("a", ends_of_a, 7), ("a.scale", [], 1)):
        cuts = sorted({0, numel, *(min(end, numel) for end in ends[: size - 1])})
        for rank, (first, stop) in enumerate(pairwise(cuts)):
            held[(rank + len(name)) % size] |= slices(name, first, stop)
            if is_full:
                held[(rank + len(name)) % size] |= parameter(name, first, stop)
    common = {"model/count": MODEL["model/count"]} if is_full else MODEL
    parts = [part_of({**common, **AVERAGE, **held[0]}), *(part_of(each) for each in held[1:])]
    assert are_sliced([manifest for manifest, _ in parts])
    digest, names = joined(parts)
    assert names == [spec.name for spec in manifest.tensors]
    assert digest == blob_digest(manifest, [data])


def test_a_state_of_whole_tensors_is_not_sliced() -> None:
    assert not are_sliced([part_of({**MODEL, **MOMENTS})[0], part_of(AVERAGE)[0]])


WHOLE = {**MODEL, **slices("b.weight", 0, 12), **slices("a.scale", 0, 1)}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([WHOLE, slices("a", 0, 3)], "slices of 'optimizer/a/exp_avg' have 3 elements, not (7,)"),
        (
            [WHOLE, slices("a", 0, 3), slices("a", 4, 7)],
            "a slice of 'optimizer/a/exp_avg' is bfloat16 from 4, after bfloat16 up to 3",
        ),
        (
            [WHOLE, slices("a", 0, 4), slices("a", 3, 7)],
            "a slice of 'optimizer/a/exp_avg' is bfloat16 from 3, after bfloat16 up to 4",
        ),
        ([WHOLE, slices("b.weight", 0, 12)], "a slice of 'optimizer/b.weight/step' is float32"),
        ([WHOLE, MODEL], "two parts of the state have the tensor 'model/"),
        (
            [WHOLE, {"slice/7/0/0/optimizer/c/exp_avg": torch.zeros(3)}],
            "'optimizer/c/exp_avg' belongs to no tensor of the model",
        ),
        (
            [WHOLE, {"slice/x/0/0/optimizer/a/exp_avg": torch.zeros(7)}],
            "names no slice of a tensor",
        ),
        ([WHOLE, {"slice/0": torch.zeros(7)}], "names no slice of a tensor"),
        ([WHOLE, {"parameter/0": torch.zeros(7)}], "names no slice of a parameter"),
        ([WHOLE, {"parameter/0/0/7xy/model/c": torch.zeros(7)}], "names no slice of a parameter"),
        ([WHOLE, parameter("a", 0, 7)], "the slices of 'model/a' contradict other tensors"),
        ([parameter("a", 0, 7)], "'model/a' is tensor 2 of the model, but only 0 of those before"),
        (
            [parameter("b.weight", 0, 5), parameter("b.weight", 6, 12)],
            "a slice of 'model/b.weight' is float32 from 6, after float32 up to 5",
        ),
        (
            [{"parameter/0/0/7/model/c": torch.zeros(5)}],
            "the slices of 'model/c' have 5 elements, not (7,)",
        ),
    ],
)
def test_slices_that_make_no_whole_are_refused(
    parts: list[dict[str, Tensor]], message: str
) -> None:
    with pytest.raises(ContradictionError) as caught:
        joined([part_of(each) for each in parts])
    assert message in str(caught.value)


def test_a_state_that_is_too_large_or_of_two_steps_is_refused() -> None:
    parts = [part_of(WHOLE), part_of(slices("a", 0, 7))]
    with pytest.raises(ContradictionError, match="limit"):
        joined(parts, replace(DEFAULT_LIMITS, max_total_bytes=100))
    with pytest.raises(ContradictionError, match="differ in 'step': '4' and '5'"):
        joined([parts[0], part_of(slices("a", 0, 7), step="5")])


def test_names_of_slices_have_the_order_of_an_undivided_state() -> None:
    names = [SliceName(2, 0, 0, "x"), SliceName(10, 0, 5, "a/b"), SliceName(10, 1, 0, "c")]
    assert sorted(reversed(names)) == names
    assert [slice_name(str(name)) for name in names] == names
    assert slice_name("optimizer/a/step") is None


@settings(max_examples=30)
@given(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3))
def test_slices_of_parameters_are_told_by_their_names(
    place: int, first: int, shape: list[int]
) -> None:
    name = ParameterSlice(place, first, tuple(shape), "model/a/b.weight")
    assert parameter_slice(str(name)) == name
    assert slice_name(str(name)) is None

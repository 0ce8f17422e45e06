"""The slices of all members: each element is one member's, and a block of the norm no two's."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.worker.exchange.all_reduce import all_reduce_schedule
from stratagem.worker.exchange.all_reduce.all_reduce_schedule import cut_pieces, cut_slices
from stratagem.worker.exchange.buckets.bucket_layout import BucketLayout, plan_layout
from stratagem.worker.exchange.buckets.gradient_norm import BLOCK
from stratagem.worker.exchange.buckets.slice_owners import divide_slices

SIZES = st.lists(
    st.one_of(
        st.integers(0, 130),
        st.integers(0, 9 * BLOCK),
        st.integers(0, 9).map(lambda count: count * BLOCK),
    ),
    max_size=12,
)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def layout_of(sizes: Sequence[int], dtypes: Sequence[torch.dtype] = ()) -> BucketLayout:
    kinds = [*dtypes[: len(sizes)], *[torch.float32] * (len(sizes) - len(dtypes))]
    params = [
        (f"p{i}", dtype, torch.Size([n]))
        for i, (n, dtype) in enumerate(zip(sizes, kinds, strict=True))
    ]
    return plan_layout(params, num_extras=7, bucket_bytes=1 << 21)


@given(SIZES, st.lists(DTYPES, max_size=12), st.integers(1, 7))
def test_every_element_is_one_members(sizes: list[int], dtypes: Any, size: int) -> None:
    layout = layout_of(sizes, dtypes)
    owners = divide_slices(layout, size)
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, parts in enumerate(owners.parts):
        assert [part.index for part in parts] == sorted({part.index for part in parts})
        for part in parts:
            found.setdefault(part.index, []).append((part.first, part.stop))
            slot = layout.slots[part.index]
            assert (part.bucket, part.offset) == (slot.bucket, slot.offset + part.first)
            assert part.first % BLOCK == 0
            assert part.stop % BLOCK == 0 or part.stop == sizes[part.index]
            start, stop = owners.slices[part.bucket][rank]
            assert start <= part.offset
            assert part.offset + part.stop - part.first <= stop
    for index, numel in enumerate(sizes):
        ranges = sorted(found[index])
        assert ranges[0][0] == 0
        assert ranges[-1][1] == numel
        assert all(left[1] == right[0] for left, right in pairwise(ranges))
    for flat, slices in zip(layout.buckets, owners.slices, strict=False):
        ends = [each for each in slices if each[0] < each[1]]
        assert all(left[1] == right[0] for left, right in pairwise(ends))
        assert sum(stop - start for start, stop in slices) <= flat.numel
        assert all(start * flat.dtype.itemsize % 64 == 0 for start, stop in ends)


@given(SIZES, st.integers(1, 7))
def test_norms_stand_in_the_order_of_a_whole_model(sizes: list[int], size: int) -> None:
    owners = divide_slices(layout_of(sizes), size)
    given_by = [
        [(part.index, part.first // BLOCK + n) for part in own for n in range(part.num_blocks)]
        for own in owners.parts
    ]
    assert [len(each) for each in given_by] == list(owners.num_norms)
    places = owners.places_of_norms()
    in_order = [given_by[rank][i] for each in places for rank, at in each for i in at]
    assert in_order == [
        (index, n) for index, numel in enumerate(sizes) for n in range(max(1, -(-numel // BLOCK)))
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_large_models_are_divided_about_equally(size: int) -> None:
    sizes = [589_824, 768, 2_359_296, 3072, 2_359_296, 768, 38_597_376]
    owners = divide_slices(layout_of(sizes), size)
    held = [sum(part.stop - part.first for part in own) for own in owners.parts]
    assert sum(held) == sum(sizes)
    assert max(held) - min(held) < 0.02 * sum(sizes)


@settings(max_examples=40)
@given(SIZES, st.integers(1, 5), st.sampled_from([1 << 10, 1 << 17, 1 << 25]))
def test_pieces_cover_every_slice_and_the_extras(
    sizes: list[int], size: int, piece_bytes: int
) -> None:
    layout, before = layout_of(sizes), all_reduce_schedule.PIECE_BYTES
    all_reduce_schedule.PIECE_BYTES = piece_bytes
    try:
        owners = divide_slices(layout, size)
        cuts = cut_pieces(layout, size, owners)
        assert cuts[: len(cut_slices(layout, owners))] == cut_slices(layout, owners)
    finally:
        all_reduce_schedule.PIECE_BYTES = before
    assert [(cut.bucket, cut.stays) for cut in cuts][-1] == (len(layout.buckets) - 1, False)
    for bucket, slices in enumerate(owners.slices):
        for rank, (start, stop) in enumerate(slices):
            ends = [cut.slices[rank] for cut in cuts if cut.bucket == bucket]
            covered = [at for each in ends for at in (each if each[0] < each[1] else ())]
            expected = [] if start == stop else [start, stop]
            assert covered[:1] + covered[-1:] == expected
            assert all(a == b for a, b in zip(covered[1:-1:2], covered[2:-1:2], strict=True))

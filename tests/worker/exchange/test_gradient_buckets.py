"""Layout, storage, hooks and launches of buckets, and the slices of members: each element is one
member's, and a block of the norm no two's."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stratagem.worker.exchange import GradientBuckets, GradientReducer, solo_exchange
from stratagem.worker.exchange.layout import (
    BLOCK,
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    BucketLayout,
    ShardOwners,
    plan_layout,
)
from stratagem.worker.exchange.slice_owners import divide_slices
from stratagem.worker.exchange.transports import SoloTransport
from tests.worker.exchange.cases import Case, buckets_of, no_scalars, one_step


def named(
    sizes: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.ones(n, dtype=dtype))) for i, n in enumerate(sizes)]


def plan(
    sizes: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(f"p{i}", dtype, torch.Size([n])) for i, n in enumerate(sizes)]


def test_layout_is_reversed_aligned_and_starts_small() -> None:
    layout = plan_layout(plan([5_000_000, 3_000_000, 7, 100_000, 1]), num_extras=3)
    assert [slot.bucket for slot in layout.slots] == [2, 1, 0, 0, 0]
    assert [slot.offset for slot in layout.slots] == [0, 0, 100_016, 16, 0]
    assert layout.buckets[0].size_bytes <= FIRST_BUCKET_BYTES
    assert all(bucket.size_bytes <= BUCKET_BYTES for bucket in layout.buckets)
    assert (layout.buckets[-1].dtype, layout.buckets[-1].numel) == (torch.float64, 3)


def test_layout_digest_follows_names_shapes_and_dtypes() -> None:
    digests = {
        plan_layout(plan([3, 4]), num_extras=1).digest,
        plan_layout(plan([4, 3]), num_extras=1).digest,
        plan_layout(plan([3, 4]), num_extras=2).digest,
        plan_layout(plan([3, 4], torch.float64), num_extras=1).digest,
        plan_layout([("q", dtype, shape) for _, dtype, shape in plan([3, 4])], num_extras=1).digest,
    }
    assert len(digests) == 5
    assert plan_layout(plan([3, 4]), num_extras=1).digest in digests


def test_dtypes_do_not_share_a_bucket_and_are_at_least_float32() -> None:
    params = [*plan([4], torch.float64), *plan([4], torch.float16), *plan([4], torch.bfloat16)]
    kinds = [bucket.dtype for bucket in plan_layout(params, num_extras=0).buckets]
    assert kinds == [torch.float32, torch.float64, torch.float64]
    with pytest.raises(ValueError, match="p0"):
        plan_layout(plan([4], torch.int64), num_extras=0)


def test_a_frozen_parameter_is_refused() -> None:
    params = named([3])
    params[0][1].requires_grad_(False)
    with pytest.raises(ValueError, match="p0"):
        GradientBuckets(params, num_extras=1)


def test_storage_and_slots_are_aligned() -> None:
    buckets = buckets_of(named([1, 7, 100]))
    solo_step(buckets)
    assert all(t.data_ptr() % 64 == 0 for t in buckets.tensors(0) if t.numel())
    assert all(view.data_ptr() % 64 == 0 for view in buckets._views[0])


def solo_step(buckets: GradientBuckets) -> None:
    exchange = solo_exchange(buckets, 1)
    exchange.begin_step(0, range(1), 1)
    exchange.begin_shard(0)
    exchange.end_shard(0, no_scalars(buckets))
    exchange.finish()


def test_parameters_without_gradient_count_as_zero() -> None:
    params = named([3, 4])
    buckets = buckets_of(params)
    exchange = solo_exchange(buckets, 2)
    for step in range(2):
        exchange.begin_step(step, range(2), 2)
        for shard in range(2):
            exchange.begin_shard(shard)
            if shard == step:
                (params[0][1].sum() * 2).backward()
            exchange.end_shard(shard, no_scalars(buckets))
        exchange.finish()
        assert params[0][1].grad is not None
        assert params[1][1].grad is not None
        assert params[0][1].grad.tolist() == [2.0] * 3
        assert params[1][1].grad.tolist() == [0.0] * 4


def test_divide_rounds_a_narrow_gradient_once() -> None:
    case = Case(2, 2, sizes=(1000,), dtype=torch.bfloat16)
    params, buckets = case.make_buckets()
    one_step(solo_exchange(buckets, 2), params, case, 0)
    buckets.divide(3.0)
    wide = case.gradient(0, 0, 0).float() + case.gradient(1, 0, 0).float()
    assert params[0].grad is not None
    assert torch.equal(params[0].grad, (wide / 3.0).bfloat16())


class Recorder(SoloTransport):
    """Notes what the reducer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def launch(self, bucket: int) -> None:
        self.notes.append(f"launch {bucket}")


def test_buckets_launch_in_order_and_within_the_last_backward() -> None:
    kinds = [torch.float32, torch.float64] * 2  # so that each parameter has its own bucket
    params = [(f"p{i}", nn.Parameter(torch.ones(4, dtype=kind))) for i, kind in enumerate(kinds)]
    buckets = buckets_of(params)
    recorder = Recorder()
    exchange = GradientReducer(buckets, ShardOwners(0, 2, 4), recorder)

    def forward() -> Tensor:
        """Backward reaches p3, p1, p2, p0 in this order."""
        value = params[0][1].sum()
        for index in (2, 1, 3):
            value = value * params[index][1].sum()
        return value

    exchange.begin_step(0, range(2), 4)
    for shard in range(2):
        exchange.begin_shard(shard)
        for index, (_, param) in enumerate(params):
            param.register_post_accumulate_grad_hook(
                lambda _, s=shard, i=index: recorder.notes.append(f"grad {i}") if s == 1 else None
            )
        forward().backward()
        if shard == 0:
            assert recorder.notes == []
        exchange.end_shard(shard, no_scalars(buckets))
    launches = [note for note in recorder.notes if note.startswith("launch")]
    assert launches == [f"launch {bucket}" for bucket in range(5)]
    # Bucket 1 (p2) and bucket 2 (p1): p1 is done first but waits for p2.
    assert recorder.notes.index("grad 1") < recorder.notes.index("launch 1")
    assert recorder.notes.index("launch 1") < recorder.notes.index("grad 0")


def test_a_second_backward_after_the_launch_is_refused() -> None:
    params = named([4])
    exchange = GradientReducer(
        GradientBuckets(params, num_extras=0), ShardOwners(0, 2, 2), Recorder()
    )
    exchange.begin_step(0, range(1), 2)
    exchange.begin_shard(0)
    params[0][1].sum().backward()
    with pytest.raises(RuntimeError, match="parameter p0 got a gradient again"):
        params[0][1].sum().backward()


def test_misuse_is_refused() -> None:
    exchange = solo_exchange(GradientBuckets(named([4]), num_extras=0), 2)
    with pytest.raises(RuntimeError, match="begin_step comes first"):
        exchange.finish()
    with pytest.raises(ValueError, match="owns"):
        exchange.begin_step(0, range(1), 2)
    with pytest.raises(ValueError, match="num_live must be 1 to 2"):
        exchange.begin_step(0, range(2), 3)
    exchange.begin_step(0, range(2), 2)
    with pytest.raises(RuntimeError, match="still to be computed"):
        exchange.finish()


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

"""Layout, storage, hooks and the order of launches, in one process."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from stratagem.worker.exchange import GradientBuckets, GradientReducer, solo_exchange
from stratagem.worker.exchange.buckets.bucket_layout import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    plan_layout,
)
from stratagem.worker.exchange.buckets.reduction_transport import SoloTransport
from stratagem.worker.exchange.buckets.shard_owners import ShardOwners, StepPlan, plan_step
from tests.worker.exchange.cases import ODD, Case, buckets_of, no_scalars, one_step


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_shards", "num_live"), [(1, 1), (2, 2), (5, 5), (8, 7), (4, 1)])
def test_one_member_adds_in_the_tree(num_shards: int, num_live: int, dtype: torch.dtype) -> None:
    case = Case(num_shards, num_live, (*ODD[:3], 2000), dtype, divisor=float(num_shards))
    params, buckets = case.make_buckets()
    exchange = solo_exchange(buckets, num_shards)
    for step in range(2):
        assert one_step(exchange, params, case, step) == case.expected(step)


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


def test_a_member_without_live_shards_launches_at_once() -> None:
    recorder = Recorder()
    exchange = GradientReducer(
        GradientBuckets(named([4]), num_extras=0), ShardOwners(1, 2, 2), recorder
    )
    exchange.begin_step(0, range(1, 2), 1)
    assert recorder.notes == ["launch 0", "launch 1"]
    with pytest.raises(ValueError, match="shard 1 is not the next"):
        exchange.begin_shard(1)


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


@pytest.mark.parametrize("num_shards", range(1, 13))
def test_plans_of_all_members_cover_the_live_shards(num_shards: int) -> None:
    for size in range(1, num_shards + 1):
        for num_live in range(1, num_shards + 1):
            steps: list[StepPlan] = [
                plan_step(ShardOwners(rank, size, num_shards), num_live) for rank in range(size)
            ]
            shards = [shard for step in steps for shard in step.live]
            assert shards == list(range(num_live))
            assert len({step.nodes for step in steps}) == 1

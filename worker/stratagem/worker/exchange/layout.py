"""The layout of an exchange: the place of each parameter in the buckets, and the additions of each
member.

The bucket layout follows from names, shapes and dtypes only and never changes, so that a run that
resumes, or a member that joins late, adds in the same places. Parameters go in reverse order, which
is about the order in which backward finishes them; the first bucket is small so that the exchange
starts early. The last bucket holds the extras.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Final

import numpy as np
import torch
from torch import Tensor

from stratagem.common.numerics.shards import Node, assign_shards, pairwise_sum, parent, tree_nodes

# ---- Bucket layout ----

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
CODED_BUCKET_BYTES = 4 << 20
"""Bucket size with a codec, since then the link waits for encoding as well as for backward."""
LENT_BUCKET_BYTES = 4 << 20
"""Bucket size if buckets give their memory back, so that few gradients are in memory at once."""
SLOT_BYTES = 64
"""Alignment of slots; the bits of a matrix product depend on alignment."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a bucket. index: the parameter's index."""

    index: int
    name: str
    bucket: int
    offset: int
    """The offset in elements of the bucket."""
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class FlatVector:
    """A flat vector that is exchanged as a whole: its number of elements and dtype."""

    dtype: torch.dtype
    numel: int

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BucketLayout:
    slots: tuple[Slot, ...]
    """The slots in order of parameter."""
    buckets: tuple[FlatVector, ...]
    """The buckets; the last one holds the extras."""

    @property
    def digest(self) -> str:
        lines = [f"{s.name} {s.bucket} {s.offset} {tuple(s.shape)}" for s in self.slots]
        lines += [f"{b.dtype} {b.numel}" for b in self.buckets]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def plan_layout(
    params: Sequence[tuple[str, torch.dtype, torch.Size]],
    *,
    num_extras: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> BucketLayout:
    """Fill buckets greedily in reverse order; each has one dtype and at least one slot."""
    slots: list[Slot] = []
    dtypes: list[torch.dtype] = []
    sizes: list[int] = []  # elements
    for index in reversed(range(len(params))):
        name, param_dtype, shape = params[index]
        dtype = _bucket_dtype(name, param_dtype)
        step = SLOT_BYTES // dtype.itemsize
        numel = -(-shape.numel() // step) * step
        limit_bytes = min(FIRST_BUCKET_BYTES, bucket_bytes) if len(sizes) == 1 else bucket_bytes
        fits = sizes and (sizes[-1] + numel) * dtype.itemsize <= limit_bytes
        if not fits or dtypes[-1] != dtype:
            dtypes.append(dtype)
            sizes.append(0)
        slots.append(Slot(index, name, len(sizes) - 1, sizes[-1], shape))
        sizes[-1] += numel
    buckets = [FlatVector(d, n) for d, n in zip(dtypes, sizes, strict=True)]
    return BucketLayout(tuple(reversed(slots)), (*buckets, FlatVector(torch.float64, num_extras)))


def _bucket_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise ValueError(f"parameter {name} is {dtype}; gradients are summed for floats only")
    return torch.promote_types(dtype, torch.float32)


# ---- Whole tensors as flat buckets ----
#
# These buckets are for tensors that are sent uncoded. Gradients have separate storage, by the
# layout above.

FLAT_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype that travel together; a large tensor has its own bucket."""

    indices: tuple[int, ...]
    """Indices of the bucket's tensors among the given ones."""
    dtype: torch.dtype
    numel: int


def plan_buckets(tensors: Sequence[Tensor]) -> tuple[Bucket, ...]:
    """Group tensors into buckets, in order and as many as fit, by shapes and dtypes only."""
    groups: list[list[int]] = []
    numel = 0
    for index, tensor in enumerate(tensors):
        size = numel + tensor.numel()
        same = groups and tensors[groups[-1][0]].dtype == tensor.dtype
        if not same or size * tensor.itemsize > FLAT_BYTES:
            groups.append([])
            size = tensor.numel()
        groups[-1].append(index)
        numel = size
    buckets = (
        Bucket(tuple(group), tensors[group[0]].dtype, sum(tensors[i].numel() for i in group))
        for group in groups
    )
    return tuple(bucket for bucket in buckets if bucket.numel)


def flatten(bucket: Bucket, tensors: Sequence[Tensor], flat: Tensor) -> Tensor:
    """Copy the bucket's tensors into a flat one, converting to its dtype."""
    start = 0
    for index in bucket.indices:
        tensor = tensors[index]
        flat[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
        start += tensor.numel()
    return flat


def unflatten(bucket: Bucket, flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat bucket back into its tensors, rounded to each tensor's dtype."""
    start = 0
    for index in bucket.indices:
        tensor = tensors[index]
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


# ---- Owners of shards ----
#
# The plan of a step determines the partial sums of each member, and its local additions before any
# exchange. All members know the two numbers that describe a step: that of the shards, and that of
# the shards with rows.


@dataclass(frozen=True, slots=True)
class ShardOwners:
    """The division of the logical shards among members, and this member's rank."""

    rank: int
    size: int
    num_shards: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or self.num_shards < 1:
            raise ValueError(
                f"rank {self.rank} of {self.size} members with {self.num_shards} shards: "
                "need 0 <= rank < size and num_shards >= 1"
            )

    @property
    def owned(self) -> range:
        return assign_shards(self.num_shards, self.size)[self.rank]


@dataclass(frozen=True, slots=True)
class SetAddition:
    """An addition of set `source` (a copy of all buckets) to set `target`, done after a shard."""

    target: int
    source: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One member's shards, sets (copies of all buckets) and additions, for num_live shards."""

    num_live: int
    live: range
    """The member's shards that have rows."""
    sets: tuple[int, ...]
    """The set for the gradients of each own live shard."""
    folds: tuple[tuple[SetAddition, ...], ...]
    """The additions to make after each of the member's live shards."""
    nodes: tuple[tuple[Node, ...], ...]
    """Each member's final partial sums, by rank. This member's are in the sets 0, 1, ... in the
    same order."""


def plan_step(party: ShardOwners, num_live: int) -> StepPlan:
    """Plan a step. Partial sums are on a stack; the top two are added whenever they are siblings in
    the tree."""
    if not 1 <= num_live <= party.num_shards:
        raise ValueError(f"num_live must be 1 to {party.num_shards}, got {num_live}")
    owned = party.owned
    live = range(owned.start, max(owned.start, min(owned.stop, num_live)))
    stack: list[Node] = []
    sets: list[int] = []
    folds: list[tuple[SetAddition, ...]] = []
    for shard in live:
        sets.append(len(stack))
        stack.append(Node(shard, shard + 1))
        now: list[SetAddition] = []
        while len(stack) > 1 and (above := parent(stack[-2], stack[-1], num_live)):
            stack[-2:] = [above]
            now.append(SetAddition(len(stack) - 1, len(stack)))
        folds.append(tuple(now))
    nodes = tuple(
        tree_nodes(shards, num_live) for shards in assign_shards(party.num_shards, party.size)
    )
    assert nodes[party.rank] == tuple(stack)
    return StepPlan(num_live, live, tuple(sets), tuple(folds), nodes)


def num_sets(party: ShardOwners) -> int:
    """Return the largest number of sets that the member needs for any number of live shards."""
    return max([0, *plan_step(party, party.num_shards).sets]) + 1


# ---- Norm of the gradient ----
#
# By the rules of `numerics` 2 each block of 65,536 elements of a parameter gives its norm in
# float64, and the squares of all blocks, in order of parameter, are added over the binary tree of
# neighbours. So a holder of only some blocks can find its part, and the whole has the same bits,
# also with another number of threads. By the rules of `numerics` 1 it is the norm of the
# parameters' norms, in their type.

BLOCK: Final = 65_536
_FEW: Final = 256
"""Up to this number of values Python adds faster than numpy."""


def parts_of(grads: Sequence[Tensor], numerics: int) -> list[Tensor]:
    """Return for each gradient the input of `total_norm`: its norm, or the norms of its blocks
    (1-d; 0-d for one block)."""
    if numerics < 2:
        return [torch.linalg.vector_norm(grad, 2.0) for grad in grads]
    return [_of_blocks(grad) for grad in grads]


def divided(grad: Tensor, divisor: float, numerics: int) -> Tensor:
    """Divide a gradient in place, and return its input for `total_norm`."""
    if numerics >= 2 and grad.is_cpu and grad.is_contiguous():
        return _of_blocks(grad, divisor)
    (part,) = parts_of([grad.div_(divisor)], numerics)
    return part


def total_norm(parts: Sequence[Tensor], numerics: int) -> Tensor:
    """Return the 2-norm (0-d) of the gradients with these parts; 0 for none."""
    if not parts:
        return torch.zeros((), dtype=torch.float32 if numerics < 2 else torch.float64)
    device = parts[0].device
    if numerics < 2:
        total: Tensor = torch.linalg.vector_norm(torch.stack([p.to(device) for p in parts]), 2.0)
        return total
    if all([part.is_cpu for part in parts]):
        norms: list[float] = []
        for part in parts:
            norms += part.tolist() if part.dim() else (part.item(),)
    else:
        norms = torch.cat([part.to(device).reshape(-1) for part in parts]).tolist()
    norm = torch.scalar_tensor(math.sqrt(_sum_of_squares(norms)), dtype=torch.float64)
    return norm if parts[0].is_cpu else norm.to(device)


class FewGradients:
    """Faster `parts_of` for small gradients on the CPU: the same bits, by preallocated buffers."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        """Allocate the buffers. shapes: the shapes of the gradients, each of at most one block."""
        self._copies = [torch.empty(shape, dtype=torch.float64) for shape in shapes]

    def parts(self, grads: Sequence[Tensor | None], numerics: int) -> list[Tensor]:
        """Return the result of `parts_of` for the gradients that are not None."""
        here = [grad for grad in grads if grad is not None]
        if not here or numerics < 2:
            return list(torch._foreach_norm(here, 2.0)) if here else []
        copies = self._copies
        if len(here) < len(grads):
            copies = [c for c, grad in zip(copies, grads, strict=True) if grad is not None]
        torch._foreach_copy_(copies, here)
        return list(torch._foreach_norm(copies, 2.0))


def _of_blocks(grad: Tensor, divisor: float | None = None) -> Tensor:
    """Return the norm of each block, after dividing the block in place if a divisor is given."""
    flat = grad.detach().reshape(-1)
    if not grad.is_cpu:
        return _norms(flat)
    # A cast inside the norm would take twice as long, with a new copy every time.
    wide = torch.empty(min(BLOCK, flat.numel()), dtype=torch.float64)
    norms = []
    for block in torch.split(flat, BLOCK):
        if divisor is not None:
            block.div_(divisor)
        room = wide if block.numel() == wide.numel() else wide[: block.numel()]
        norms.append(torch.linalg.vector_norm(room.copy_(block)))
    return norms[0] if len(norms) == 1 else torch.stack(norms)


def _norms(flat: Tensor) -> Tensor:
    """Return the norm of each block; all whole blocks are computed at once."""
    if flat.numel() <= BLOCK:
        norm: Tensor = torch.linalg.vector_norm(flat, 2.0, dtype=torch.float64)
        return norm
    whole = flat.numel() - flat.numel() % BLOCK
    parts = [flat[:whole].view(-1, BLOCK)] + [flat[whole:].view(1, -1)] * (whole < flat.numel())
    return torch.cat(
        [torch.linalg.vector_norm(part, 2.0, dim=1, dtype=torch.float64) for part in parts]
    )


def _sum_of_squares(norms: list[float]) -> float:
    if len(norms) > _FEW:
        values = np.array(norms)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sum
            return pairwise_sum(values * values)
    squares = [norm * norm for norm in norms]
    while len(squares) > 1:  # as `tree_sum` does
        above = list(map(add, squares[::2], squares[1::2]))
        squares = above if len(squares) % 2 == 0 else [*above, squares[-1]]
    return squares[0]

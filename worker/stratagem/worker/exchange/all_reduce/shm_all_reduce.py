"""Sums in shared memory: every member's buckets are mapped by all, and nothing is sent.

Once all members say that a bucket is full, each adds its own slice over all members' partial sums,
in the tree, and writes the sum into the same slice of every member's set 0. No other member reads
or writes that slice, so one barrier per bucket is enough, and one at the end of the step. Has no
thread: a bucket is added when the torch thread comes by with the next one, or in `finish`. Adding
costs little, and waking another thread costs as much and takes a core from backward.
Where members own slices, sums stay with them, and what they make of them the others read in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.common.numerics.batch_shards import Node, split_rows
from stratagem.worker.exchange.all_reduce.all_reduce_schedule import tree_additions
from stratagem.worker.exchange.all_reduce.transfer_ops import Addition
from stratagem.worker.exchange.buckets.bucket_layout import SLOT_BYTES, BucketLayout
from stratagem.worker.exchange.buckets.gradient_buckets import GradientBuckets
from stratagem.worker.exchange.buckets.shard_owners import ShardOwners, StepPlan, num_sets
from stratagem.worker.exchange.buckets.slice_owners import SliceOwners
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.shm_buffers import SharedGroup

BLOCK_BYTES = 256 << 10
"""What is added, divided and copied in one go, so that it stays in the cache of one core."""

MemberSets = Sequence[Sequence[Sequence[Tensor]]]
"""By rank, set and bucket."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of this member's slice of a bucket."""

    additions: tuple[Addition, ...]
    total: Tensor
    """What the additions end in; a part of this member's set 0."""
    copies: tuple[Tensor, ...]
    """The same place in the set 0 of every other member."""
    is_extras: bool

    def run(self, divisor: float | None) -> None:
        for addition in self.additions:
            addition.run()
        if divisor is not None and not self.is_extras:
            self.total.div_(divisor)
        for copy in self.copies:
            copy.copy_(self.total)


class SharedTransport:
    """A `ReductionTransport` among the members of a group, which it owns. The buckets are in its
    memory until it is closed."""

    name = SharedGroup.name

    def __init__(
        self,
        group: SharedGroup,
        buckets: GradientBuckets,
        party: ShardOwners,
        *,
        deadline_s: float,
        owners: SliceOwners | None = None,
    ) -> None:
        """owners: of the sums, where these stay with them."""
        self.deadline_s = deadline_s
        self._group, self._buckets, self._party = group, buckets, party
        self._owners = owners
        parties = [ShardOwners(rank, party.size, party.num_shards) for rank in range(party.size)]
        counts = [num_sets(member) for member in parties]
        num_norms = [0] * party.size if owners is None else [n + 1 for n in owners.num_norms]
        layout = buckets.layout
        sizes = [count * _set_bytes(layout) for count in counts]
        further = [torch.float64.itemsize * count for count in num_norms]
        shared = [size + more for size, more in zip(sizes, further, strict=True)]
        segments = group.share(shared, deadline_s)
        self._sets: MemberSets = [
            [_one_set(layout, segment, index) for index in range(count)]
            for segment, count in zip(segments, counts, strict=True)
        ]
        self._norms = [
            segment[size:].view(torch.float64)
            for segment, size in zip(segments, sizes, strict=True)
        ]
        buckets.move_to(self._sets[party.rank])
        self._num_buckets = len(layout.buckets)
        self._prepared: dict[int, list[list[Block]]] = {}
        self._blocks: list[list[Block]] = []
        self._divisor: float | None = None
        self._first_token = 0
        self._num_launched = 0
        self._num_reduced = 0
        self._error = ""

    def begin(
        self, number: int, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        if len(sets) > len(self._sets[self._party.rank]):
            raise ValueError(f"{len(sets)} sets, but the members share fewer")
        if step.num_live not in self._prepared:
            prepared = prepare_blocks(self._party, step, self._sets, self._owners)
            self._prepared[step.num_live] = prepared
        self._blocks, self._divisor = self._prepared[step.num_live], divisor
        self._num_launched = self._num_reduced = 0

    def launch(self, bucket: int) -> None:
        self._num_launched = bucket + 1
        self._group.send_token()
        while self._num_reduced < self._num_launched and self._group.has_heard(
            self._first_token + self._num_reduced + 1
        ):
            self._reduce_next()

    def finish(self) -> None:
        if self._group.is_cut:
            self._error = self._error or "the exchange was cut"
        if self._error:
            raise ExchangeError(self._error)
        try:
            self._reduce_rest()
        except ExchangeError as error:
            self._error = str(error)
            self._group.cut()
            raise

    def gather_norms(self, own: Tensor) -> list[Tensor]:
        """See `SliceTransport`. What others have read of the step before they have read when they
        launch this step's buckets."""
        self._norms[self._party.rank].copy_(own)
        self._meet()
        return self._norms

    def open_sums(self) -> Sequence[Sequence[Tensor]]:
        """See `SliceTransport`: the others' own buckets."""
        self._meet()
        return [sets[0] for sets in self._sets]

    def open_slices(self) -> Sequence[Sequence[Tensor]]:
        """See `SliceTransport`: the others' own buckets."""
        self._meet()
        return [sets[0] for sets in self._sets]

    def close_slices(self) -> None:
        """See `SliceTransport`."""
        self._meet()

    def cut(self) -> None:
        self._group.cut()

    def close(self) -> None:
        # A member that was frozen may go on writing into this memory when it wakes up.
        self._buckets.move_to(())
        self._prepared.clear()
        self._blocks, self._sets, self._norms = [], [], []
        self._group.cut()
        self._group.close()

    def _reduce_rest(self) -> None:
        last = self._first_token + self._num_buckets + 1
        while self._num_reduced < self._num_buckets:
            self._group.hear(self._first_token + self._num_reduced + 1, last, self.deadline_s)
            self._reduce_next()
        self._group.send_token()
        self._group.hear(last, last, self.deadline_s)
        self._first_token = last

    def _meet(self) -> None:
        """Blocks until all members are here."""
        self._first_token += 1
        self._group.send_token()
        self._group.hear(self._first_token, self._first_token, self.deadline_s)

    def _reduce_next(self) -> None:
        for block in self._blocks[self._num_reduced]:
            block.run(self._divisor)
        self._num_reduced += 1


def prepare_blocks(
    party: ShardOwners, step: StepPlan, sets: MemberSets, owners: SliceOwners | None = None
) -> list[list[Block]]:
    """Returns by bucket the blocks that this member adds; together the members' blocks are each
    bucket once. owners: of the sums, where these stay with them."""
    own = sets[party.rank][0]
    blocks = []
    for bucket, flat in enumerate(own):
        is_extras = bucket == len(own) - 1
        slices = None if owners is None or is_extras else owners.slices[bucket]
        start, stop = _equal_slice(flat, party) if slices is None else slices[party.rank]
        stays, step_numel = slices is not None, BLOCK_BYTES // flat.element_size()
        ends = [(at, min(at + step_numel, stop)) for at in range(start, stop, step_numel)]
        blocks.append([_block(party, step, sets, bucket, *each, stays=stays) for each in ends])
    return blocks


def _equal_slice(flat: Tensor, party: ShardOwners) -> tuple[int, int]:
    """Returns this member's slice of a flat bucket; each begins on SLOT_BYTES."""
    step = SLOT_BYTES // flat.element_size()
    mine = split_rows(-(-flat.numel() // step), party.size)[party.rank]
    return mine.start * step, min(mine.stop * step, flat.numel())


def _block(
    party: ShardOwners,
    step: StepPlan,
    sets: MemberSets,
    bucket: int,
    start: int,
    stop: int,
    *,
    stays: bool,
) -> Block:
    def part(rank: int, index: int) -> Tensor:
        return sets[rank][index][bucket].narrow(0, start, stop - start)

    total = part(party.rank, 0)
    partials: dict[Node, Tensor] = {}
    for rank, nodes in enumerate(step.nodes):
        for index, node in enumerate(nodes):
            partials[node] = total if (rank, index) == (party.rank, 0) else part(rank, index)
    return Block(
        additions=tree_additions(partials, step.num_live, total),
        total=total,
        copies=tuple(part(rank, 0) for rank in range(party.size) if rank != party.rank)
        if not stays
        else (),
        is_extras=bucket == len(sets[party.rank][0]) - 1,
    )


# ---- the sets in a segment ----


def _offsets(layout: BucketLayout) -> list[int]:
    """Returns the offset in bytes of each bucket in a set, and last the size of the set."""
    offsets = [0]
    for bucket in layout.buckets:
        offsets.append(offsets[-1] + -(-bucket.size_bytes // SLOT_BYTES) * SLOT_BYTES)
    return offsets


def _set_bytes(layout: BucketLayout) -> int:
    return _offsets(layout)[-1]


def _one_set(layout: BucketLayout, segment: Tensor, index: int) -> list[Tensor]:
    base = index * _set_bytes(layout)
    return [
        segment.narrow(0, base + offset, bucket.size_bytes).view(bucket.dtype)
        for bucket, offset in zip(layout.buckets, _offsets(layout), strict=False)
    ]

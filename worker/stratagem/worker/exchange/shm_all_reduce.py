"""Sum gradients in shared memory: all members map each other's buckets, and nothing is sent.

Once a bucket of all members is full, each adds its own slice over all members' partial sums, in the
tree, and writes the sum into the same slice of every member's set 0. No other member reads or
writes that slice, so one barrier per bucket is enough, and one at the end of the step. The
transport has no thread: it adds a bucket when the torch thread launches the next one, or in
`finish`. Adding costs little, and waking a thread costs as much and takes a core from backward.
Where members own slices, sums stay with them, and the others read the updated parameters in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from stratagem.common.numerics.shards import Node, split_rows
from stratagem.worker.exchange.all_reduce import tree_additions
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.layout import (
    SLOT_BYTES,
    BucketLayout,
    ShardOwners,
    StepPlan,
    num_sets,
)
from stratagem.worker.exchange.slice_owners import (
    HeldBlocks,
    KeptSums,
    SliceOwners,
    kept_in,
    shared_bytes,
)
from stratagem.worker.exchange.transports import Addition
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.shm import SharedGroup

BLOCK_BYTES = 256 << 10
"""Size of a block that is added, divided and copied at once, to fit into a core's cache."""

NUM_WINDOWS = 2
"""The number of windows (buffers that buckets use in turn); two are enough, since a member launches
a bucket when all have launched the previous one, and so have added the one before that."""

MemberSets = Sequence[Sequence[Sequence[Tensor]]]
"""Tensors by rank, set and bucket."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of this member's slice of a bucket."""

    additions: tuple[Addition, ...]
    total: Tensor
    """The tensor for the sum: a part of this member's set 0, the set that receives the sums."""
    copies: tuple[Tensor, ...]
    """The same part in the set 0 of every other member, to which the sum is copied."""
    is_extras: bool

    def run(self, divisor: float | None) -> None:
        for addition in self.additions:
            addition.run()
        if divisor is not None and not self.is_extras:
            self.total.div_(divisor)
        for copy in self.copies:
            copy.copy_(self.total)


class SharedTransport:
    """A `ReductionTransport` among the members of a group, which it takes over. The buckets are in
    its memory until it is closed."""

    name = SharedGroup.name

    def __init__(
        self,
        group: SharedGroup,
        buckets: GradientBuckets,
        party: ShardOwners,
        *,
        deadline_s: float,
        owners: SliceOwners | None = None,
        held: HeldBlocks | None = None,
        kept: KeptSums | None = None,
    ) -> None:
        """Move the buckets to shared memory.

        owners: the owners of the sums, if sums stay with them. held: the parts of the parameters,
        if these do, too. kept: the storage of own sums, if buckets give their memory back: buckets
        then share a few windows of shared memory, which also holds the mirrored sums.
        """
        self.deadline_s = deadline_s
        self._group, self._buckets, self._party = group, buckets, party
        self._owners = owners
        parties = [ShardOwners(rank, party.size, party.num_shards) for rank in range(party.size)]
        counts = [num_sets(member) for member in parties]
        num_norms = [0] * party.size if owners is None else [n + 1 for n in owners.num_norms]
        offsets = _offsets(buckets.layout, None if kept is None else NUM_WINDOWS)
        self._kept_sums = kept
        sizes = [count * offsets[-1] for count in counts]
        further = [torch.float64.itemsize * count for count in num_norms]
        ends = [size + more for size, more in zip(sizes, further, strict=True)]
        starts = [-(-end // SLOT_BYTES) * SLOT_BYTES for end in ends]
        rest_bytes = [0] * party.size if held is None else [sum(blocks) for blocks in held.sizes]
        stops = [start + more for start, more in zip(starts, rest_bytes, strict=True)]
        more_bytes = shared_bytes(kept, buckets.layout, owners, party.size)
        shared = [stop + more for stop, more in zip(stops, more_bytes, strict=True)]
        segments = group.share(shared, deadline_s)
        self._sets: MemberSets = [
            [_one_set(buckets.layout, segment, offsets, index) for index in range(count)]
            for segment, count in zip(segments, counts, strict=True)
        ]
        self._norms = [
            segment[size:end].view(torch.float64)
            for segment, size, end in zip(segments, sizes, ends, strict=True)
        ]
        self.parameters: SharedParameters | None = None
        if held is not None:
            places = zip(segments, starts, stops, strict=True)
            memory = [segment[start:stop] for segment, start, stop in places]
            self.parameters = SharedParameters(self, held, party.rank, memory)
        if kept is None:
            buckets.move_to(self._sets[party.rank])
        self._sums = self._place_sums([s[stop:] for s, stop in zip(segments, stops, strict=True)])
        """The sums of each rank's slices, as all members see them."""
        self._num_buckets = len(buckets.layout.buckets)
        self._prepared: dict[int, list[list[Block]]] = {}
        self._blocks: list[list[Block]] = []
        self._divisor: float | None = None
        self._first_token = 0
        self._given: Sequence[Sequence[Tensor]] = ()
        """The own partial sums of the step, if they must be copied into windows."""
        self._num_launched = 0
        self._num_reduced = 0
        self._error = ""

    def _place_sums(self, memory: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Return each member's sums of its slice, by rank; with a mirror they are moved to shared
        memory. memory: the part of each segment after the buckets."""
        if self._kept_sums is None or self._kept_sums.mirrored is None or self._owners is None:
            return [sets[0] for sets in self._sets]
        layout, owners = self._buckets.layout, self._owners
        sums: list[Sequence[Tensor]] = [
            kept_in(segment, layout, owners, rank) for rank, segment in enumerate(memory)
        ]
        self._kept_sums.move_to(sums[self._party.rank])
        return sums

    def begin(
        self, number: int, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        if len(sets) > len(self._sets[self._party.rank]):
            raise ValueError(f"{len(sets)} sets, but the members share fewer")
        if step.num_live not in self._prepared:
            prepared = prepare_blocks(self._party, step, self._sets, self._owners, self._kept_sums)
            self._prepared[step.num_live] = prepared
        self._blocks, self._divisor = self._prepared[step.num_live], divisor
        self._given = sets[: len(step.nodes[self._party.rank])]
        self._num_launched = self._num_reduced = 0

    def launch(self, bucket: int) -> None:
        if self._kept_sums is not None:
            self._fill_window(bucket)
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
            if self._kept_sums is not None:
                self._buckets.tensors(0)[-1].copy_(self._sets[self._party.rank][0][-1])
        except ExchangeError as error:
            self._error = str(error)
            self._group.cut()
            raise

    def gather_norms(self, own: Tensor) -> list[Tensor]:
        """Return every member's norms, by rank. They overwrite the norms of the previous step,
        which all members have read before they launch this step's buckets."""
        self._norms[self._party.rank].copy_(own)
        self.meet()
        return self._norms

    def open_sums(self) -> Sequence[Tensor]:
        """Block until all sums are complete; return those of the previous member's slice."""
        self.meet()
        return self._sums[(self._party.rank - 1) % self._party.size]

    def open_slices(self) -> Sequence[Sequence[Tensor]]:
        """Block until all members have updated their slices; return each member's buckets."""
        self.meet()
        return [sets[0] for sets in self._sets]

    def close_slices(self) -> None:
        """Block until all members have read the slices that they need."""
        self.meet()

    @property
    def is_cut(self) -> bool:
        return self._group.is_cut

    def cut(self) -> None:
        self._group.cut()

    def close(self) -> None:
        # A frozen member may continue to write into this memory when it wakes up.
        self._buckets.move_to(())
        self._prepared.clear()
        self._blocks, self._sets, self._sums, self._norms = [], [], [], []
        self.parameters = None
        self._group.cut()
        self._group.close()

    def _fill_window(self, bucket: int) -> None:
        """Copy this member's partial sums of a bucket to its window, once all members have added
        its earlier content. Raises ExchangeError."""
        while self._num_reduced < bucket:
            count = self._first_token + self._num_reduced + 1
            self._group.hear(count, self._first_token + self._num_buckets + 1, self.deadline_s)
            self._reduce_next()
        for shared, flats in zip(self._sets[self._party.rank], self._given, strict=False):
            shared[bucket].copy_(flats[bucket])
        if bucket < self._num_buckets - 1:
            self._buckets.give_back(bucket)

    def _reduce_rest(self) -> None:
        last = self._first_token + self._num_buckets + 1
        while self._num_reduced < self._num_buckets:
            self._group.hear(self._first_token + self._num_reduced + 1, last, self.deadline_s)
            self._reduce_next()
        self._group.send_token()
        self._group.hear(last, last, self.deadline_s)
        self._first_token = last

    def meet(self) -> None:
        """Block until all members have called this (a barrier)."""
        self._first_token += 1
        self._group.send_token()
        self._group.hear(self._first_token, self._first_token, self.deadline_s)

    def _reduce_next(self) -> None:
        for block in self._blocks[self._num_reduced]:
            block.run(self._divisor)
        self._num_reduced += 1


class SharedParameters:
    """A `ParameterTransport` in memory that all members map, so that each reads it when needed.
    Nobody writes there before all have launched their last bucket of the step."""

    def __init__(
        self, transport: SharedTransport, held: HeldBlocks, rank: int, segments: Sequence[Tensor]
    ) -> None:
        """Map the segments: by rank, that member's parts of all blocks."""
        self.held = held
        self._transport, self._rank = transport, rank
        self._parts: list[Sequence[Tensor]] = [
            segment.split(list(sizes)) for segment, sizes in zip(segments, held.sizes, strict=True)
        ]

    def memory(self) -> Sequence[Tensor]:
        """Return for each block the memory in which this member keeps its parts."""
        return self._parts[self._rank]

    def fetch(self, block: int) -> Sequence[Tensor]:
        """Return each rank's part of a block, in the memory that all members map."""
        if self._transport.is_cut:
            raise ExchangeError("the exchange was cut")
        return [parts[block] for parts in self._parts]

    def end_passes(self) -> None:
        """Do nothing: other members read the memory without help."""

    def updated(self) -> None:
        """Block until all members have updated their parts."""
        self._transport.meet()

    def cut(self) -> None:
        """Do nothing: the reduction's transport is cut, and `fetch` then raises."""

    def close(self) -> None:
        """Drop the references to the shared memory."""
        self._parts = []


def prepare_blocks(
    party: ShardOwners,
    step: StepPlan,
    sets: MemberSets,
    owners: SliceOwners | None = None,
    kept: KeptSums | None = None,
) -> list[list[Block]]:
    """Return by bucket the blocks that this member adds; the blocks of all members cover each
    bucket once. owners: those of sums that stay with them. kept: those sums' place, if not set
    0."""
    flats = sets[party.rank][0]
    blocks = []
    for bucket, flat in enumerate(flats):
        is_extras = bucket == len(flats) - 1
        slices = None if owners is None or is_extras else owners.slices[bucket]
        start, stop = _equal_slice(flat, party) if slices is None else slices[party.rank]
        stays = _Staying(slices is not None, kept)
        step_numel = BLOCK_BYTES // flat.element_size()
        ends = [(at, min(at + step_numel, stop)) for at in range(start, stop, step_numel)]
        blocks.append([_block(party, step, sets, bucket, *bounds, stays=stays) for bounds in ends])
    return blocks


class _Staying(NamedTuple):
    """Where the sums of slices stay: their owners, and this member's storage if it is not set 0."""

    stays: bool
    kept: KeptSums | None


def _equal_slice(flat: Tensor, party: ShardOwners) -> tuple[int, int]:
    """Return this member's slice of a flat bucket; each begins at a multiple of SLOT_BYTES."""
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
    stays: "_Staying",
) -> Block:
    def part(rank: int, index: int) -> Tensor:
        return sets[rank][index][bucket].narrow(0, start, stop - start)

    first = total = part(party.rank, 0)
    if stays.stays and stays.kept is not None:
        total = stays.kept.part(bucket, start, stop)
    partials: dict[Node, Tensor] = {}
    for rank, nodes in enumerate(step.nodes):
        for index, node in enumerate(nodes):
            partials[node] = first if (rank, index) == (party.rank, 0) else part(rank, index)
    return Block(
        additions=tree_additions(partials, step.num_live, total),
        total=total,
        copies=tuple(part(rank, 0) for rank in range(party.size) if rank != party.rank)
        if not stays.stays
        else (),
        is_extras=bucket == len(sets[party.rank][0]) - 1,
    )


# ---- Sets in a shared segment ----


def _offsets(layout: BucketLayout, num_windows: int | None) -> list[int]:
    """Return the offset in bytes of each bucket in a set, and finally the size of the set.

    num_windows: buckets but the extras share this many windows; None: each has its place.
    """
    sizes = [-(-bucket.size_bytes // SLOT_BYTES) * SLOT_BYTES for bucket in layout.buckets]
    if num_windows is None:
        return [0, *accumulate(sizes)]
    *others, extras = sizes
    window = max(others, default=0)
    places = [number % num_windows * window for number in range(len(others))]
    return [*places, num_windows * window, num_windows * window + extras]


def _one_set(
    layout: BucketLayout, segment: Tensor, offsets: Sequence[int], index: int
) -> list[Tensor]:
    base = index * offsets[-1]
    return [
        segment.narrow(0, base + offset, bucket.size_bytes).view(bucket.dtype)
        for bucket, offset in zip(layout.buckets, offsets, strict=False)
    ]

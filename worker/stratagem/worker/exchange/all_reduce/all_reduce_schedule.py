"""The direct exchange, as lists of transfers and additions prepared before the first byte moves.

A bucket is cut into pieces, and each piece into one slice per member. A member sends its partial
sums of slice p to member p (phase 1), adds what it received of its own slice in tree order and
sends the sum back to all (phase 2): the bandwidth of a ring, two latencies, and bits that depend
on nothing but the shards. A small bucket is not cut: among few members each sends everything
to all others and adds for itself, among more it goes up and down a tree. Where members own slices,
every bucket but the extras is cut into these, and sums stay with their owners: there is no phase 2.
Prepares only; moves nothing and waits for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.common.numerics.shards import Node, split_rows, tree_sum
from stratagem.worker.exchange.all_reduce.transfer_ops import Addition, Transfer
from stratagem.worker.exchange.all_reduce.tree_all_reduce import Tree, plan_tree
from stratagem.worker.exchange.buckets.bucket_layout import SLOT_BYTES, BucketLayout, FlatVector
from stratagem.worker.exchange.buckets.kept_sums import KeptSums
from stratagem.worker.exchange.buckets.shard_owners import ShardOwners, StepPlan
from stratagem.worker.exchange.buckets.slice_owners import SliceOwners

PIECE_BYTES = 32 << 20
"""So only a bucket made of one huge parameter is cut. Smaller pieces overlap more but cost a
round of wake-ups each: on two busy cores, pieces of 1 MiB cost a step of 230 ms about 20 ms more
CPU, pieces of 8 MiB about 5 ms (benchmarks/data_parallel.py, 10 M parameters)."""
SMALL_BYTES = 256 << 10
"""Below this size fewer messages are worth more than fewer bytes. Over gRPC on two busy cores,
64 KiB take 2.4, 7.8 and 18 ms at 2, 4 and 8 members, and 2.0, 18 and 66 ms in slices; 1 MiB at 4
members take 15 against 19 ms (benchmarks/small_buckets.py)."""
MAX_GATHER_MEMBERS = 3
"""Among so few a small bucket is gathered by all, which is one latency, else it goes through a
tree. 64 KiB at 3 members take 4.3 against 3.5 ms over gRPC and 4.1 against 8.0 over gloo; at 4
members 14 against 8 over gRPC; at 8 members 44 against 18 over gRPC, 17 against 14 over gloo."""

Sets = Sequence[Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Cut:
    """One piece of a bucket: by rank, the elements [start, stop) that each member adds up."""

    bucket: int
    is_gathered: bool
    is_tree: bool
    slices: tuple[tuple[int, int], ...]
    stays: bool = False
    """Each sum stays with the member that added it up."""


@dataclass(frozen=True, slots=True)
class Piece:
    """All that one member does for one piece of a bucket."""

    bucket: int
    is_extras: bool
    adds_in_place: bool
    """Additions overwrite what this member sends, so its sends must be done first."""
    send_partials: tuple[Transfer, ...]
    receive_partials: tuple[Transfer, ...]
    additions: tuple[Addition, ...]
    total: Tensor
    """What the additions end in: this member's slice, or all of a gathered bucket."""
    send_sums: tuple[Transfer, ...]
    receive_sums: tuple[Transfer, ...]
    tree: Tree | None = None
    """Instead of all of the above but `total`."""


def cut_pieces(
    layout: BucketLayout, size: int, owners: SliceOwners | None = None
) -> tuple[Cut, ...]:
    """Returns the pieces of all buckets in order; the same on all members. owners: of the sums,
    where these stay with them."""
    if owners is not None:
        last = len(layout.buckets) - 1
        return (*cut_slices(layout, owners), *_cut_bucket(last, layout.buckets[last], size))
    buckets = enumerate(layout.buckets)
    return tuple(cut for index, bucket in buckets for cut in _cut_bucket(index, bucket, size))


def cut_slices(layout: BucketLayout, owners: SliceOwners) -> tuple[Cut, ...]:
    """Returns the pieces of all slices in order: of each, every member has a part of its own."""
    cuts = []
    for index, slices in enumerate(owners.slices):
        bucket = layout.buckets[index]
        num_pieces = -(-bucket.size_bytes // PIECE_BYTES)
        for number in range(num_pieces):
            parts = tuple(_nth_part(each, num_pieces, number, bucket) for each in slices)
            cuts.append(Cut(index, False, False, parts, stays=True))
    return tuple(cuts)


def _nth_part(
    whole: tuple[int, int], count: int, number: int, bucket: FlatVector
) -> tuple[int, int]:
    """Returns one of `count` parts of a slice; each begins on SLOT_BYTES."""
    start, stop = whole
    step = SLOT_BYTES // bucket.dtype.itemsize
    part = split_rows(-(-(stop - start) // step), count)[number]
    return min(start + part.start * step, stop), min(start + part.stop * step, stop)


def num_tags(cuts: Sequence[Cut], party: ShardOwners) -> int:
    """Returns how many tags one step uses: for each piece one per shard, and one for the sum."""
    return len(cuts) * (party.num_shards + 1)


def prepare(
    cuts: Sequence[Cut],
    party: ShardOwners,
    step: StepPlan,
    sets: Sets,
    window: int,
    kept: KeptSums | None = None,
) -> tuple[Piece, ...]:
    """Returns this member's part in all pieces. What it receives in phase 1 is in buffers that
    piece i shares with piece i + window, so at most `window` pieces may be under way. kept: where
    sums end that stay here, if not in set 0."""
    foreign = [
        (peer, node)
        for peer, nodes in enumerate(step.nodes)
        for node in nodes
        if peer != party.rank
    ]
    largest_bytes = max((_own_bytes(cut, party.rank, sets) for cut in cuts), default=0)
    device = sets[0][-1].device
    ring = [
        [
            torch.empty(largest_bytes, dtype=torch.uint8, device=device)
            for _ in range(max(1, len(foreign)))
        ]
        for _ in range(min(window, len(cuts)))
    ]
    builder = _Builder(party, step, sets, foreign, kept)
    return tuple(
        builder.build(cut, index * (party.num_shards + 1), ring[index % window])
        for index, cut in enumerate(cuts)
    )


def _cut_bucket(index: int, bucket: FlatVector, size: int) -> list[Cut]:
    if bucket.numel == 0:
        return []
    if bucket.size_bytes < SMALL_BYTES:
        is_tree = size > MAX_GATHER_MEMBERS
        return [Cut(index, not is_tree, is_tree, ((0, bucket.numel),) * size)]
    step = SLOT_BYTES // bucket.dtype.itemsize  # every slice begins on SLOT_BYTES
    num_units = -(-bucket.numel // step)
    cuts = []
    for piece in split_rows(num_units, -(-bucket.size_bytes // PIECE_BYTES)):
        parts = [piece[part.start : part.stop] for part in split_rows(len(piece), size)]
        ends = [(p.start * step, p.stop * step) for p in parts]
        slices = [(min(a, bucket.numel), min(b, bucket.numel)) for a, b in ends]
        cuts.append(Cut(index, False, False, tuple(slices)))
    return cuts


def _own_bytes(cut: Cut, rank: int, sets: Sets) -> int:
    start, stop = cut.slices[rank]
    return (stop - start) * sets[0][cut.bucket].element_size()


@dataclass(frozen=True, slots=True)
class _Builder:
    party: ShardOwners
    step: StepPlan
    sets: Sets
    foreign: list[tuple[int, Node]]
    kept: KeptSums | None

    def build(self, cut: Cut, first_tag: int, stage: list[Tensor]) -> Piece:
        return (self._tree if cut.is_tree else self._direct)(cut, first_tag, stage)

    def _tree(self, cut: Cut, first_tag: int, stage: list[Tensor]) -> Piece:
        flats = [one_set[cut.bucket] for one_set in self.sets]
        room = _stage(stage[0], flats[0])
        return Piece(
            bucket=cut.bucket,
            is_extras=cut.bucket == len(self.sets[0]) - 1,
            adds_in_place=False,
            send_partials=(),
            receive_partials=(),
            additions=(),
            total=flats[0],
            send_sums=(),
            receive_sums=(),
            tree=plan_tree(self.party, self.step, flats, first_tag, room),
        )

    def _direct(self, cut: Cut, first_tag: int, stage: list[Tensor]) -> Piece:
        rank = self.party.rank
        own = self.step.nodes[rank]
        peers = [p for p in range(self.party.size) if p != rank and _is_wanted(cut, p)]
        is_mine = _is_wanted(cut, rank)
        flats = [one_set[cut.bucket] for one_set in self.sets]
        first = total = _slice(flats[0], cut, rank)
        if self.kept is not None and cut.stays:
            total = self.kept.part(cut.bucket, *cut.slices[rank])
        received = [_stage(buffer, total) for buffer in stage]
        partials = {node: _slice(flat, cut, rank) for node, flat in zip(own, flats, strict=False)}
        if own:
            partials[own[0]] = first
        partials |= {node: t for (_, node), t in zip(self.foreign, received, strict=False)}
        sum_tag = first_tag + self.party.num_shards
        returns_sums = not cut.is_gathered and not cut.stays
        return Piece(
            bucket=cut.bucket,
            is_extras=cut.bucket == len(self.sets[0]) - 1,
            total=total,
            adds_in_place=cut.is_gathered,
            send_partials=tuple(
                Transfer(peer, first_tag + node.first, _slice(flat, cut, peer))
                for peer in peers
                for node, flat in zip(own, flats, strict=False)
            ),
            receive_partials=tuple(
                Transfer(peer, first_tag + node.first, tensor)
                for (peer, node), tensor in zip(self.foreign, received, strict=False)
                if is_mine
            ),
            additions=tree_additions(partials, self.step.num_live, total) if is_mine else (),
            send_sums=tuple(
                Transfer(peer, sum_tag, total)
                for peer in range(self.party.size)
                if peer != rank and is_mine and returns_sums
            ),
            receive_sums=tuple(
                Transfer(peer, sum_tag, _slice(flats[0], cut, peer))
                for peer in peers
                if returns_sums
            ),
        )


def _is_wanted(cut: Cut, rank: int) -> bool:
    start, stop = cut.slices[rank]
    return start < stop


def _slice(flat: Tensor, cut: Cut, rank: int) -> Tensor:
    start, stop = cut.slices[rank]
    return flat.narrow(0, start, stop - start)


def _stage(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer.narrow(0, 0, like.numel() * like.element_size()).view(like.dtype)


def tree_additions(
    partials: dict[Node, Tensor], num_live: int, total: Tensor
) -> tuple[Addition, ...]:
    """Returns the additions of the tree sum of partials into total, which overwrites partials on
    the way."""
    additions: list[Addition] = []

    def add(left: Tensor, right: Tensor) -> Tensor:
        additions.append(Addition(left, left, right))
        return left

    root = tree_sum(partials, num_live, add)
    if additions:
        last = additions.pop()
        additions.append(Addition(total, last.left, last.right))
    elif root is not total:
        additions.append(Addition(total, root, None))
    return tuple(additions)

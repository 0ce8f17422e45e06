"""Plan and run the direct exchange of gradient buckets between members (AllReduce).

A bucket is cut into pieces, and each piece into one slice per member. A member sends its partial
sums of slice p to member p (phase 1), adds what it received of its own slice in tree order, and
sends the sum back to all (phase 2). This has the bandwidth of a ring, two latencies, and bits that
depend on nothing but the shards. A small bucket is not cut: among few members each sends everything
to all others and adds for itself; among more it goes up and down a tree. Where members own slices,
every bucket but the extras is cut into these, and sums stay with their owners: there is no phase 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from stratagem.common.numerics.shards import Node, split_node, split_rows, tree_sum
from stratagem.worker.exchange.buckets import NUM_WINDOWS, LentBuckets
from stratagem.worker.exchange.layout import (
    SLOT_BYTES,
    BucketLayout,
    FlatVector,
    ShardOwners,
    StepPlan,
)
from stratagem.worker.exchange.slice_owners import KeptSums, SliceOwners
from stratagem.worker.exchange.transfer_thread import Turn
from stratagem.worker.exchange.transports import Addition, Transfer, start_transfers
from stratagem.worker.mesh.link import Link, PendingTransfer

# ---- Tree all-reduce of a small bucket ----
#
# Partial sums go up the tree over shards: the member that computed the leftmost shard of a node
# adds it up, and receives the right child from the member that did the same there. The sum goes
# down from member 0 by doubling: 2 ceil(log2 N) rounds and, with a shard for each member, 2 (N - 1)
# messages, for any N. Additions are those of the direct exchange, so the bits are the same.
# Planning moves nothing.


@dataclass(frozen=True, slots=True)
class Hop:
    """A message that a member sends or receives on its way through the tree."""

    transfer: Transfer
    is_send: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """One member's messages and additions in the tree for a small bucket, in order."""

    up: tuple[Hop | Addition, ...]
    """The operations up the tree, which bring the sum to member 0's set 0 (copy of the buckets)."""
    down: tuple[Hop, ...]
    """The messages down the tree, after which all members have the sum."""


def plan_tree(
    party: ShardOwners, step: StepPlan, flats: Sequence[Tensor], first_tag: int, stage: Tensor
) -> Tree:
    """Return one member's part in the tree. flats: this bucket in each of the member's sets (copies
    of all buckets); stage: a buffer for one message. Uses the tags [first_tag, first_tag +
    num_shards]."""
    rank = party.rank
    held = {
        node: (owner, index)
        for owner, nodes in enumerate(step.nodes)
        for index, node in enumerate(nodes)
    }
    up: list[Hop | Addition] = []

    def add_up(node: Node) -> tuple[int, int]:
        """Plan a node's sum; return (the member that then has it, the index of its set with it)."""
        if node in held:
            return held[node]
        below = split_node(node)
        left, right = (add_up(child) for child in below)
        tag = first_tag + below[1].first  # no other right child begins there
        if right[0] == rank != left[0]:
            up.append(Hop(Transfer(left[0], tag, flats[right[1]]), is_send=True))
        if left[0] == rank:
            other = flats[right[1]] if right[0] == rank else stage
            if right[0] != rank:
                up.append(Hop(Transfer(right[0], tag, stage), is_send=False))
            up.append(Addition(flats[left[1]], flats[left[1]], other))
        return left

    add_up(Node(0, step.num_live))
    return Tree(tuple(up), _down(rank, party.size, first_tag + party.num_shards, flats[0]))


def _down(rank: int, size: int, tag: int, total: Tensor) -> tuple[Hop, ...]:
    """Return one member's messages on the way down: in round k the members below 2^k send to those
    2^k above them."""
    hops = []
    distance = 1
    while distance < size:
        if distance <= rank < 2 * distance:
            hops.append(Hop(Transfer(rank - distance, tag, total), is_send=False))
        elif rank < distance and rank + distance < size:
            hops.append(Hop(Transfer(rank + distance, tag, total), is_send=True))
        distance *= 2
    return tuple(hops)


# ---- Schedule of transfers and additions ----
#
# All transfers and additions of a member are prepared before the first byte moves.

PIECE_BYTES = 32 << 20
"""The size of a piece, so that only a bucket of one huge parameter is cut. Smaller pieces overlap
more but cost a round of wake-ups each: on two busy cores, pieces of 1 MiB cost a step of 230 ms
about 20 ms more CPU, pieces of 8 MiB about 5 ms (benchmarks/data_parallel.py, 10 M parameters)."""
SMALL_BYTES = 256 << 10
"""The size below which fewer messages are worth more than fewer bytes. Over gRPC on two busy cores,
64 KiB take 2.4, 7.8 and 18 ms at 2, 4 and 8 members, and 2.0, 18 and 66 ms in slices; 1 MiB at 4
members take 15 against 19 ms (benchmarks/small_buckets.py)."""
MAX_GATHER_MEMBERS = 3
"""The most members among which all gather a small bucket, with one latency; among more it goes
through a tree. 64 KiB at 3 members take 4.3 against 3.5 ms over gRPC and 4.1 against 8.0 over gloo;
at 4 members 14 against 8 over gRPC; at 8 members 44 against 18 over gRPC, 17 against 14 over
gloo."""

Sets = Sequence[Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Cut:
    """One piece of a bucket: for each rank, the elements [start, stop) that it adds."""

    bucket: int
    is_gathered: bool
    is_tree: bool
    slices: tuple[tuple[int, int], ...]
    stays: bool = False
    """True if each sum stays with the member that added it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One member's transfers and additions for one piece of a bucket."""

    bucket: int
    is_extras: bool
    adds_in_place: bool
    """True if additions overwrite what this member sends, so that its sends must complete first."""
    send_partials: tuple[Transfer, ...]
    receive_partials: tuple[Transfer, ...]
    additions: tuple[Addition, ...]
    total: Tensor
    """The result of the additions: this member's slice, or all of a gathered bucket."""
    send_sums: tuple[Transfer, ...]
    receive_sums: tuple[Transfer, ...]
    tree: Tree | None = None
    """The tree, used instead of all fields above but `total`; None for pieces cut into slices."""


def cut_pieces(
    layout: BucketLayout, size: int, owners: SliceOwners | None = None
) -> tuple[Cut, ...]:
    """Return the pieces of all buckets, in order and equal on all members. owners: the owners of
    the sums, if sums stay with them."""
    if owners is not None:
        last = len(layout.buckets) - 1
        return (*cut_slices(layout, owners), *_cut_bucket(last, layout.buckets[last], size))
    buckets = enumerate(layout.buckets)
    return tuple(cut for index, bucket in buckets for cut in _cut_bucket(index, bucket, size))


def cut_slices(layout: BucketLayout, owners: SliceOwners) -> tuple[Cut, ...]:
    """Return the pieces of all slices in order; every member has one part of each piece."""
    cuts = []
    for index, slices in enumerate(owners.slices):
        bucket = layout.buckets[index]
        num_pieces = -(-bucket.size_bytes // PIECE_BYTES)
        for number in range(num_pieces):
            parts = tuple(_nth_part(bounds, num_pieces, number, bucket) for bounds in slices)
            cuts.append(Cut(index, False, False, parts, stays=True))
    return tuple(cuts)


def _nth_part(
    whole: tuple[int, int], count: int, number: int, bucket: FlatVector
) -> tuple[int, int]:
    """Return part `number` of `count` parts of a slice; each begins at a multiple of SLOT_BYTES."""
    start, stop = whole
    step = SLOT_BYTES // bucket.dtype.itemsize
    part = split_rows(-(-(stop - start) // step), count)[number]
    return min(start + part.start * step, stop), min(start + part.stop * step, stop)


def num_tags(cuts: Sequence[Cut], party: ShardOwners) -> int:
    """Return the number of tags of one step: for each piece one per shard, plus one for the sum."""
    return len(cuts) * (party.num_shards + 1)


def prepare(
    cuts: Sequence[Cut],
    party: ShardOwners,
    step: StepPlan,
    sets: Sets,
    window: int,
    kept: KeptSums | None = None,
) -> tuple[Piece, ...]:
    """Return this member's part in the exchange of all pieces. Pieces i and i + window share
    receive buffers, so at most `window` pieces may be in progress. kept: the storage of sums that
    stay on this member, if that is not set 0."""
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
    step = SLOT_BYTES // bucket.dtype.itemsize  # every slice begins at a multiple of SLOT_BYTES
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
        nodes = self.step.nodes[rank]
        peers = [p for p in range(self.party.size) if p != rank and _is_wanted(cut, p)]
        is_mine = _is_wanted(cut, rank)
        flats = [one_set[cut.bucket] for one_set in self.sets]
        first = total = _slice(flats[0], cut, rank)
        if self.kept is not None and cut.stays:
            total = self.kept.part(cut.bucket, *cut.slices[rank])
        received = [_stage(buffer, total) for buffer in stage]
        partials = {node: _slice(flat, cut, rank) for node, flat in zip(nodes, flats, strict=False)}
        if nodes:
            partials[nodes[0]] = first
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
                for node, flat in zip(nodes, flats, strict=False)
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
    """Return the additions that sum the partials in the tree; they overwrite the partials."""
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


# ---- Execution of the schedule ----
#
# Receives are posted ahead, the next pieces are sent while one is being added, and nothing waits
# earlier than necessary for the end of a piece.

WINDOW = 4
"""The number of pieces in progress at once."""


class DirectMethod:
    """The all-reduce in which each member sums its slices in tree order: shards alone fix the
    bits."""

    suffix = ""

    def __init__(
        self,
        link: Link,
        layout: BucketLayout,
        party: ShardOwners,
        owners: SliceOwners | None = None,
        lent: LentBuckets | None = None,
    ) -> None:
        """Plan the pieces. owners: the owners of the sums, if sums stay with them. lent: the
        windows, if buckets give their memory back."""
        self._link, self._party = link, party
        self._cuts = cut_pieces(layout, link.size, owners)
        self.num_tags = num_tags(self._cuts, party)
        self._window = 1 if link.in_order else WINDOW
        self._lent = lent

    def prepare(self, step: StepPlan, sets: Sequence[Sequence[Tensor]]) -> "_Prepared":
        sums = None
        if self._lent is not None:
            sets, sums = self._lent.sets(sets), self._lent.kept
        pieces = prepare(self._cuts, self._party, step, sets, self._window, sums)
        return _Prepared(pieces, len(step.nodes[self._party.rank]))

    def run(self, prepared: "_Prepared", turn: Turn) -> None:
        pieces, num_partials = prepared
        _DirectRun(self._link, pieces, turn, self._window, self._lent, num_partials).run()


class _Prepared(NamedTuple):
    pieces: tuple[Piece, ...]
    num_partials: int
    """The number of sets (copies of the buckets) from which this member sends."""


@dataclass(slots=True)
class _DirectRun:
    """The transfers and additions of one step in progress."""

    link: Link
    pieces: tuple[Piece, ...]
    turn: Turn
    window: int
    lent: LentBuckets | None = None
    num_partials: int = 0
    num_filled: int = 0
    """The number of buckets that were copied into windows."""
    receives: list[list[PendingTransfer]] = field(default_factory=list)
    """Pending receives of phase 1 (others' partial sums), by piece."""
    sends: list[list[PendingTransfer]] = field(default_factory=list)
    """Pending sends of phase 1 (own partial sums), by piece."""
    rest: list[PendingTransfer] = field(default_factory=list)
    """Pending transfers of phase 2 (finished sums)."""

    def run(self) -> None:
        for index, piece in enumerate(self.pieces):
            self._send_ready(index)
            if piece.tree is not None:
                self._climb(piece, piece.tree)
                continue
            self.turn.wait(self.receives[index])
            if piece.adds_in_place:
                self.turn.wait(self.sends[index])
            for addition in piece.additions:
                addition.run()
            if self.turn.divisor is not None and not piece.is_extras:
                piece.total.div_(self.turn.divisor)  # still in the cache, once for all members
            if self.link.in_order:
                self.rest += self._post(piece.send_sums, piece.receive_sums)
            else:
                self.rest += self._post(piece.send_sums, ())
        for works in self.sends:
            self.turn.wait(works)
        self.turn.wait(self.rest)

    def _has_window(self, bucket: int, index: int) -> bool:
        """Return whether a bucket is in its window (send buffer). It is copied into the window
        first, if that is free and piece `index` is the first one not yet added."""
        if self.lent is None or bucket < self.num_filled:
            return True
        before = bucket - NUM_WINDOWS
        if before >= self.pieces[index].bucket:
            return False
        for piece, works in zip(self.pieces, self.sends, strict=False):
            if piece.bucket <= before:
                self.turn.wait(works)
        while self.num_filled <= bucket:
            self.lent.fill(self.num_filled, self.num_partials)
            self.num_filled += 1
        return True

    def _send_ready(self, index: int) -> None:
        """Send piece `index` after its bucket's launch, and later ready pieces within the
        window."""
        last = min(index + self.window, len(self.pieces))
        if not self.link.in_order:
            while len(self.receives) < last:
                ahead = self.pieces[len(self.receives)]
                self.receives.append(self._post((), ahead.receive_partials))
        num_launched = self.turn.await_launch(self.pieces[index].bucket)
        while len(self.sends) < last and self.pieces[len(self.sends)].bucket < num_launched:
            piece = self.pieces[len(self.sends)]
            if not self._has_window(piece.bucket, index):
                break
            if self.link.in_order:
                works = self._post(piece.send_partials, piece.receive_partials)
                self.receives.append(works)
                self.sends.append([])
            else:
                self.sends.append(self._post(piece.send_partials, ()))
                # Sums can be received over the partial sums: a member sends a sum only after it
                # has received all of ours for it.
                self.rest += self._post((), piece.receive_sums)

    def _climb(self, piece: Piece, tree: Tree) -> None:
        """Pass a small bucket up and down the tree, one message at a time, adding in between."""
        for move in tree.up:
            if isinstance(move, Hop):
                self._hop(move)
            else:
                move.run()
        if self.turn.divisor is not None and not piece.is_extras and self.link.rank == 0:
            piece.total.div_(self.turn.divisor)
        for hop in tree.down:
            self._hop(hop)

    def _hop(self, hop: Hop) -> None:
        peer, tag = hop.transfer.peer, self.turn.first_tag + hop.transfer.tag
        if hop.is_send:
            # The sum overwrites the partial sums that went up, after all of these have arrived.
            self.rest.append(self.link.send(peer, tag, hop.transfer.tensor))
            return
        self.turn.wait([self.link.recv(peer, tag, hop.transfer.tensor)])

    def _post(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer]
    ) -> list[PendingTransfer]:
        """Start the sends and receives of this all-reduce; return the transfers in progress."""
        received, sent = start_transfers(self.link, self.turn.first_tag, sends, receives)
        return received + sent

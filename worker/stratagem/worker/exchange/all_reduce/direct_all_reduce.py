"""The direct exchange over a link: executes what `all_reduce_schedule` prepared, in the order of
time.

Receives are posted ahead, the next pieces are sent while one is being added, and nothing waits for
the end of a piece before it must.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from stratagem.worker.exchange.all_reduce.all_reduce_schedule import (
    Piece,
    cut_pieces,
    num_tags,
    prepare,
)
from stratagem.worker.exchange.all_reduce.transfer_ops import Transfer, start_transfers
from stratagem.worker.exchange.all_reduce.tree_all_reduce import Hop, Tree
from stratagem.worker.exchange.buckets.bucket_layout import BucketLayout
from stratagem.worker.exchange.buckets.lent_buckets import NUM_WINDOWS, LentBuckets
from stratagem.worker.exchange.buckets.shard_owners import ShardOwners, StepPlan
from stratagem.worker.exchange.buckets.slice_owners import SliceOwners
from stratagem.worker.exchange.buckets.transfer_thread import Turn
from stratagem.worker.mesh.link import Link, PendingTransfer

WINDOW = 4
"""Pieces under way at once."""


class DirectMethod:
    """Each member adds its own slices in the tree; bits depend on nothing but the shards."""

    suffix = ""

    def __init__(
        self,
        link: Link,
        layout: BucketLayout,
        party: ShardOwners,
        owners: SliceOwners | None = None,
        lent: LentBuckets | None = None,
    ) -> None:
        """owners: of the sums, where these stay with them. lent: where buckets give their memory
        back."""
        self._link, self._party = link, party
        self._cuts = cut_pieces(layout, link.size, owners)
        self.num_tags = num_tags(self._cuts, party)
        self._window = 1 if link.in_order else WINDOW
        self._lent = lent

    def prepare(self, step: StepPlan, sets: Sequence[Sequence[Tensor]]) -> "_Prepared":
        kept = None
        if self._lent is not None:
            sets, kept = self._lent.sets(sets), self._lent.kept
        pieces = prepare(self._cuts, self._party, step, sets, self._window, kept)
        return _Prepared(pieces, len(step.nodes[self._party.rank]))

    def run(self, prepared: "_Prepared", turn: Turn) -> None:
        pieces, num_partials = prepared
        _DirectRun(self._link, pieces, turn, self._window, self._lent, num_partials).run()


class _Prepared(NamedTuple):
    pieces: tuple[Piece, ...]
    num_partials: int
    """Sets in which this member has something to send."""


@dataclass(slots=True)
class _DirectRun:
    """One step under way."""

    link: Link
    pieces: tuple[Piece, ...]
    turn: Turn
    window: int
    lent: LentBuckets | None = None
    num_partials: int = 0
    num_filled: int = 0
    """Buckets that were copied into windows."""
    receives: list[list[PendingTransfer]] = field(default_factory=list)
    """Phase 1, by piece."""
    sends: list[list[PendingTransfer]] = field(default_factory=list)
    """Phase 1, by piece."""
    rest: list[PendingTransfer] = field(default_factory=list)
    """Phase 2."""

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
                piece.total.div_(self.turn.divisor)  # while it is warm, and once for all members
            if self.link.in_order:
                self.rest += self._post(piece.send_sums, piece.receive_sums)
            else:
                self.rest += self._post(piece.send_sums, ())
        for works in self.sends:
            self.turn.wait(works)
        self.turn.wait(self.rest)

    def _has_window(self, bucket: int, index: int) -> bool:
        """Returns whether a bucket is where it is sent from, or can be brought there while piece
        `index` is the first that is not added up."""
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
        """Sends piece `index` as soon as its bucket was launched, and those behind it that may
        be under way too and are ready by then."""
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
        """Runs a tree up and down, message by message; its own sums are already among them."""
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
            # The sum comes back over what went up, but only after all of that has arrived.
            self.rest.append(self.link.send(peer, tag, hop.transfer.tensor))
            return
        self.turn.wait([self.link.recv(peer, tag, hop.transfer.tensor)])

    def _post(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer]
    ) -> list[PendingTransfer]:
        """Starts transfers and returns them all."""
        received, sent = start_transfers(self.link, self.turn.first_tag, sends, receives)
        return received + sent

"""All-gather of coded shards: every member sends its shards' messages to all others.

Every member decodes all of them and adds them in the tree, so only messages are sent. They are
fewer bytes than sums as long as the messages of all shards together are smaller than two sets of
gradients; `pays_off` is the rule, the same for all members. Messages are sent portion by portion,
while backward and coding work on the next ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from stratagem.common.numerics.shards import Node, assign_shards, split_node
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.compressor import Compressor, Portion
from stratagem.worker.exchange.layout import ShardOwners, StepPlan
from stratagem.worker.exchange.transfer_thread import Turn
from stratagem.worker.exchange.transports import Transfer, start_transfers
from stratagem.worker.mesh.link import Link, PendingTransfer
from stratagem.worker.mesh.staging import host_room

ON_DEVICE: Final = ("nccl",)
"""Engines that can only send from the memory of the device."""


def pays_off(compressor: Compressor, num_shards: int) -> bool:
    """Return whether coded messages take fewer bytes than sums, which travel to the member that
    adds and back."""
    return num_shards * compressor.message_bytes < 2 * compressor.raw_bytes


@dataclass(frozen=True, slots=True)
class _Prepared:
    step: StepPlan
    sets: Sequence[Sequence[Tensor]]
    incoming: Sequence[Mapping[int, Tensor]]
    """The buffers of received pieces, by portion and by shard of another member."""


class PayloadMethod:
    """A `Method` that sends each shard's coded pieces to all members."""

    suffix = " payloads"

    def __init__(
        self, link: Link, buckets: GradientBuckets, party: ShardOwners, compressor: Compressor
    ) -> None:
        self._link, self._buckets, self._party = link, buckets, party
        self._compressor = compressor
        self._portions = compressor.portions(buckets.layout)
        self._owners = {
            shard: rank
            for rank, owned in enumerate(assign_shards(party.num_shards, party.size))
            for shard in owned
        }
        self.num_tags = party.num_shards * len(self._portions)

    def prepare(self, step: StepPlan, sets: Sequence[Sequence[Tensor]]) -> _Prepared:
        foreign = [shard for shard in range(step.num_live) if shard not in step.live]
        device, compressor = sets[0][0].device, self._compressor
        incoming = [
            {shard: self._room(compressor.piece_bytes(portion), device) for shard in foreign}
            for portion in self._portions
        ]
        return _Prepared(step, sets, incoming)

    def _room(self, num_bytes: int, device: torch.device) -> Tensor:
        """Allocate the receive buffer for a piece, on the host or on this device."""
        if self._link.name in ON_DEVICE:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return host_room((num_bytes,), torch.uint8, device)

    def run(self, prepared: _Prepared, turn: Turn) -> None:
        under_way = _UnderWay(self._portions, turn)
        if not self._link.in_order:
            # Receives come before all sends: gloo announces a receive to the peer after its own
            # sends, so members that send first would take turns.
            for portion in self._portions:
                receives = self._receives(prepared, portion)
                under_way.receives += start_transfers(self._link, turn.first_tag, (), receives)[:1]
        step, sets = prepared.step, prepared.sets
        for portion in self._portions:
            self._send_ready(under_way, prepared, portion)
            turn.wait(under_way.receives[portion.index])
            self._send_ready(under_way, prepared, portion)  # those that are ready by now
            parts = [[flats[bucket] for bucket in portion.buckets] for flats in sets]
            partials = dict(zip(step.nodes[self._link.rank], parts, strict=False))
            incoming = prepared.incoming[portion.index]
            summing = Summing(self._buckets, self._compressor, portion, partials, incoming)
            put(parts[0], summing.total(step.num_live), turn.divisor, portion.has_extras)
        turn.wait(under_way.sends)
        self._count(len(step.live))

    def _send_ready(self, under_way: "_UnderWay", prepared: _Prepared, awaited: Portion) -> None:
        """Send this portion once it is launched, and later ones that are launched already."""
        num_launched = under_way.turn.await_launch(awaited.buckets[-1])
        for portion in self._portions[under_way.num_sent :]:
            if portion.buckets[-1] >= num_launched:
                return
            sends = self._sends(prepared, portion)
            receives = self._receives(prepared, portion) if self._link.in_order else []
            received, sent = start_transfers(self._link, under_way.turn.first_tag, sends, receives)
            if self._link.in_order:
                under_way.receives.append(received)
            under_way.sends += sent
            under_way.num_sent += 1

    def _sends(self, prepared: _Prepared, portion: Portion) -> list[Transfer]:
        """Return the transfers that send the pieces of this member's shards to all others."""
        device = next((e.device for e in prepared.incoming[0].values()), torch.device("cpu"))
        pieces = {
            shard: self._compressor.piece(shard, portion).to(device) for shard in prepared.step.live
        }
        return [
            Transfer(peer, self._tag(shard, portion), piece)
            for peer in range(self._link.size)
            if peer != self._link.rank
            for shard, piece in pieces.items()
        ]

    def _receives(self, prepared: _Prepared, portion: Portion) -> list[Transfer]:
        """Return the transfers that receive the others' pieces."""
        return [
            Transfer(self._owners[shard], self._tag(shard, portion), room)
            for shard, room in prepared.incoming[portion.index].items()
        ]

    def _tag(self, shard: int, portion: Portion) -> int:
        return shard * len(self._portions) + portion.index

    def _count(self, num_live: int) -> None:
        num_peers, size = self._link.size - 1, self._link.size
        compressor = self._compressor
        sent_bytes = sum(map(compressor.piece_bytes, self._portions)) * num_live * num_peers
        compressor.count(sent_bytes, int(compressor.raw_bytes * 2 * num_peers / size))


@dataclass(slots=True)
class _UnderWay:
    """The transfers that have been started in a step."""

    portions: Sequence[Portion]
    turn: Turn
    receives: list[list[PendingTransfer]] = field(default_factory=list)
    """Pending receives of the others' coded pieces, by portion."""
    sends: list[PendingTransfer] = field(default_factory=list)
    num_sent: int = 0
    """The number of portions sent."""


@dataclass(frozen=True, slots=True)
class Summing:
    """The sum of one portion over all live shards, from partial sums and the others' coded pieces.

    It may overwrite the partial sums. A shard is decoded only when it is added, so that few are in
    memory.
    """

    buckets: GradientBuckets
    compressor: Compressor
    portion: Portion
    partials: Mapping[Node, Sequence[Tensor]]
    """Partial sums as flat buckets, keyed by node of the tree."""
    incoming: Mapping[int, Tensor]
    """The other members' coded pieces of the portion, by shard."""

    def total(self, num_live: int) -> Sequence[Tensor]:
        """Return the portion's sum over all live shards, as flat buckets."""
        return self._total(Node(0, num_live))

    def _total(self, node: Node) -> Sequence[Tensor]:
        if node in self.partials:
            return self.partials[node]
        if node.stop - node.first == 1:
            flats, views = self.buckets.scratch(self.portion.buckets)
            extras = self._decode(node.first, views, adds=False)
            if extras.numel():
                flats[-1].copy_(extras)
            return flats
        first, second = split_node(node)
        total = self._total(first)
        if second not in self.partials and second.stop - second.first == 1:
            views = self.buckets.views_of(total, self.portion.buckets)
            extras = self._decode(second.first, views, adds=True)
            if extras.numel():
                total[-1].add_(extras.to(total[-1].device))
            return total
        for target, term in zip(total, self._total(second), strict=True):
            target.add_(term)
        return total

    def _decode(self, shard: int, views: Sequence[Tensor], *, adds: bool) -> Tensor:
        return self.compressor.decode(shard, self.portion, self.incoming[shard], views, adds=adds)


def put(
    target: Sequence[Tensor], total: Sequence[Tensor], divisor: float | None, has_extras: bool
) -> None:
    """Write the divided sum into the target; extras, in the last bucket, are not divided."""
    for flat, summed in zip(target, total, strict=True):
        if flat is not summed:
            flat.copy_(summed)
    if divisor is not None:
        for flat in target[:-1] if has_extras else target:
            flat.div_(divisor)

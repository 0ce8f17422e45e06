"""All-gather of coded shards: every member sends its shards' messages to all others.

Everybody decodes all of them and adds them in the tree, so nothing but messages is sent. That is
fewer bytes than exchanging sums as long as the messages of all shards together are smaller than
two sets of gradients; `pays_off` is the rule, the same for all members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stratagem.common.shards import Node, assign_shards, split_node
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.compressor import Compressor
from stratagem.worker.exchange.mesh import Turn
from stratagem.worker.exchange.plan import Party, Step
from stratagem.worker.mesh.link import Link, Work
from stratagem.worker.mesh.staging import host_room

ON_DEVICE: Final = ("nccl",)
"""Engines that send from the memory of the device only."""


def pays_off(compressor: Compressor, num_shards: int) -> bool:
    """Each exchange of sums sends every gradient to where it is added, and the sum back."""
    return num_shards * compressor.message_bytes < 2 * compressor.raw_bytes


@dataclass(frozen=True, slots=True)
class _Prepared:
    step: Step
    sets: Sequence[Sequence[Tensor]]
    incoming: Mapping[int, Tensor]
    """By shard of another member, where its message arrives."""


class PayloadMethod:
    """A `Method` that sends what the compressor has made of each shard."""

    suffix = " payloads"

    def __init__(
        self, link: Link, buckets: GradientBuckets, party: Party, compressor: Compressor
    ) -> None:
        self._link, self._buckets, self._party = link, buckets, party
        self._compressor = compressor
        self._owners = {
            shard: rank
            for rank, owned in enumerate(assign_shards(party.num_shards, party.size))
            for shard in owned
        }
        self.num_tags = party.num_shards

    def prepare(self, step: Step, sets: Sequence[Sequence[Tensor]]) -> _Prepared:
        foreign = [shard for shard in range(step.num_live) if shard not in step.live]
        return _Prepared(step, sets, {shard: self._room(sets[0][0].device) for shard in foreign})

    def _room(self, device: torch.device) -> Tensor:
        """For a message that goes to this device."""
        num_bytes = self._compressor.message_bytes
        if self._link.name in ON_DEVICE:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return host_room((num_bytes,), torch.uint8, device)

    def run(self, prepared: _Prepared, turn: Turn) -> None:
        turn.await_launch(len(self._buckets.layout.buckets) - 1)
        receives, sends = self._post(prepared, turn.first_tag)
        turn.wait(receives)
        step, sets = prepared.step, prepared.sets
        partials = dict(zip(step.nodes[self._link.rank], sets, strict=False))
        incoming = prepared.incoming
        total = add_up(self._buckets, self._compressor, step.num_live, partials, incoming)
        put(sets[0], total, turn.divisor)
        turn.wait(sends)

    def _post(self, prepared: _Prepared, first_tag: int) -> tuple[list[Work], list[Work]]:
        """(receives, sends). A link that goes by order alone needs mirrored orders: of two members
        the lower one sends first. Over others receives go first: gloo tells a peer of one behind
        what it sends itself, so members that send first would take turns."""
        link, receives, sends = self._link, list[Work](), list[Work]()
        device = next((each.device for each in prepared.incoming.values()), torch.device("cpu"))
        own = [(s, self._compressor.messages[s].to(device)) for s in prepared.step.live]
        for peer in range(link.size):
            if peer == link.rank:
                continue
            sends_first = link.in_order and link.rank < peer
            for is_send in (True, False) if sends_first else (False, True):
                if is_send:
                    sends += [link.send(peer, first_tag + s, message) for s, message in own]
                else:
                    receives += [
                        link.recv(peer, first_tag + shard, buffer)
                        for shard, buffer in prepared.incoming.items()
                        if self._owners[shard] == peer
                    ]
        num_bytes = [self._compressor.message_bytes, self._compressor.raw_bytes]
        factors = [len(own) * (link.size - 1), 2 * (link.size - 1) / link.size]
        self._compressor.count(num_bytes[0] * int(factors[0]), int(num_bytes[1] * factors[1]))
        return receives, sends


def add_up(
    buckets: GradientBuckets,
    compressor: Compressor,
    num_live: int,
    partials: Mapping[Node, Sequence[Tensor]],
    incoming: Mapping[int, Tensor],
) -> Sequence[Tensor]:
    """The flat buckets of the sum over all live shards, from partial sums and from messages of the
    others. May overwrite the partial sums; decodes a shard when its turn comes, and where it is
    added to another at once, so that few are held."""

    def total(node: Node) -> Sequence[Tensor]:
        if node in partials:
            return partials[node]
        if node.stop - node.first == 1:
            flats, views = buckets.scratch()
            flats[-1].copy_(compressor.decode(node.first, incoming[node.first], views))
            return flats
        first, second = split_node(node)
        left = total(first)
        if second not in partials and second.stop - second.first == 1:
            said = incoming[second.first]
            extras = compressor.decode(second.first, said, buckets.views_of(left), adds=True)
            left[-1].add_(extras.to(left[-1].device))
            return left
        for target, term in zip(left, total(second), strict=True):
            target.add_(term)
        return left

    return total(Node(0, num_live))


def put(target: Sequence[Tensor], total: Sequence[Tensor], divisor: float | None) -> None:
    """Leaves the sum, divided, in the target; the last bucket, the extras, is never divided."""
    for flat, summed in zip(target, total, strict=True):
        if flat is not summed:
            flat.copy_(summed)
    if divisor is not None:
        for flat in target[:-1]:
            flat.div_(divisor)

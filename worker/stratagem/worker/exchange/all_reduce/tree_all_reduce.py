"""Tree all-reduce of a small bucket, as the messages of one member, prepared beforehand.

Partial sums go up the tree over shards: the member that computed the leftmost shard of a node adds
it up, and receives the right child from the member that did the same there. The sum goes down from
member 0 by doubling: 2 ceil(log2 N) rounds and, with a shard for each member, 2 (N - 1) messages,
for any N. Additions are those of the direct exchange, so the bits are too. Moves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stratagem.common.numerics.shards import Node, split_node
from stratagem.worker.exchange.all_reduce.transfer_ops import Addition, Transfer
from stratagem.worker.exchange.buckets.shard_owners import ShardOwners, StepPlan


@dataclass(frozen=True, slots=True)
class Hop:
    """One message that a member sends or receives."""

    transfer: Transfer
    is_send: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """The messages and additions of one member, in order."""

    up: tuple[Hop | Addition, ...]
    """Afterwards member 0 holds the sum in its set 0."""
    down: tuple[Hop, ...]
    """Afterwards all do."""


def plan_tree(
    party: ShardOwners, step: StepPlan, flats: Sequence[Tensor], first_tag: int, stage: Tensor
) -> Tree:
    """Returns one member's part in the tree. flats: this bucket in every set of the member; stage:
    room for one message.

    Uses the tags [first_tag, first_tag + num_shards].
    """
    rank = party.rank
    held = {
        node: (owner, index)
        for owner, nodes in enumerate(step.nodes)
        for index, node in enumerate(nodes)
    }
    up: list[Hop | Addition] = []

    def add_up(node: Node) -> tuple[int, int]:
        """Returns (the member that ends up with the sum of the node, the set that it is in)."""
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
    """Returns one member's messages on the way down: in round k the members below 2^k send to those
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

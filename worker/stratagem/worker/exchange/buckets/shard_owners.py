"""The plan of a step: which member holds which partial sums, and what it adds locally before any
exchange.

A step is described by two numbers that all members know: how many shards there are and how many
of them have rows. Pure; knows neither tensors nor the network.
"""

from dataclasses import dataclass

from stratagem.common.numerics.shards import Node, assign_shards, parent, tree_nodes


@dataclass(frozen=True, slots=True)
class ShardOwners:
    """The members among whom the logical shards are divided, and which one this is."""

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
    """One addition that a member does after a shard: the set `source` onto the set `target`."""

    target: int
    source: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The shards, sets and additions of this member in a step with num_live shards."""

    num_live: int
    live: range
    """Its own shards that have rows."""
    sets: tuple[int, ...]
    """For each live shard of its own, the set that its gradients go into."""
    folds: tuple[tuple[SetAddition, ...], ...]
    """For each live shard of its own, what is added once it is there."""
    nodes: tuple[tuple[Node, ...], ...]
    """By rank: the partial sums that each member ends up with, in order. Its own are in the sets
    0, 1, ... in the same order."""


def plan_step(party: ShardOwners, num_live: int) -> StepPlan:
    """Plans a step: keeps partial sums on a stack and adds the top two whenever they are
    siblings."""
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
    """Returns how many sets the member needs at most; with fewer live shards it needs no more."""
    return max([0, *plan_step(party, party.num_shards).sets]) + 1

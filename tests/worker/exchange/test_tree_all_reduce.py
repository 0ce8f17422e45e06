"""How many messages a tree takes, in how many rounds; the bits are tested over every engine."""

import pytest
import torch

from stratagem.worker.exchange.all_reduce.tree_all_reduce import Hop, Tree, plan_tree
from stratagem.worker.exchange.buckets.shard_owners import ShardOwners, plan_step


def trees(size: int, num_shards: int, num_live: int) -> list[Tree]:
    """By rank."""
    found = []
    for rank in range(size):
        party = ShardOwners(rank, size, num_shards)
        step = plan_step(party, num_live)
        flats = [torch.zeros(1) for _ in range(max(1, len(step.nodes[rank])))]
        found.append(plan_tree(party, step, flats, 100, torch.zeros(1)))
    return found


def hops(tree: Tree) -> list[Hop]:
    return [move for move in (*tree.up, *tree.down) if isinstance(move, Hop)]


@pytest.mark.parametrize("size", range(1, 10))
def test_with_a_shard_for_each_member_every_edge_is_used_once_each_way(size: int) -> None:
    found = trees(size, size, size)
    assert sum(hop.is_send for tree in found for hop in hops(tree)) == 2 * (size - 1)
    depth = (size - 1).bit_length()
    assert max(sum(1 for m in tree.up if isinstance(m, Hop)) for tree in found) <= depth
    assert max(len(tree.down) for tree in found) <= depth


@pytest.mark.parametrize("num_shards", range(1, 12))
def test_every_message_is_sent_and_received_once_under_a_tag_of_its_own(num_shards: int) -> None:
    for size in range(1, num_shards + 1):
        for num_live in range(1, num_shards + 1):
            found = trees(size, num_shards, num_live)
            sent = [
                (rank, hop.transfer.peer, hop.transfer.tag)
                for rank, tree in enumerate(found)
                for hop in hops(tree)
                if hop.is_send
            ]
            received = [
                (hop.transfer.peer, rank, hop.transfer.tag)
                for rank, tree in enumerate(found)
                for hop in hops(tree)
                if not hop.is_send
            ]
            assert sorted(sent) == sorted(received)
            assert len(set(sent)) == len(sent)
            assert all(100 <= tag <= 100 + num_shards for *_, tag in sent)

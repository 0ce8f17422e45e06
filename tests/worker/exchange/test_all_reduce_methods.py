"""The plans and messages of a tree, and ring and native all-reduce, which are about the sum."""

import pytest
import torch

from stratagem.worker.exchange import mesh_exchange
from stratagem.worker.exchange.all_reduce import Hop, Tree, plan_tree
from stratagem.worker.exchange.layout import ShardOwners, num_sets, plan_step
from tests.worker.exchange.cases import SMALL, Case, CountingLink, sums_of
from tests.worker.mesh.engines import links_of


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
def test_plans_of_all_members_fit_together(num_shards: int) -> None:
    """Each live shard is one member's, no step needs more sets than are shared, and every message
    is sent and received once under a tag of its own."""
    for size in range(1, num_shards + 1):
        members = [ShardOwners(rank, size, num_shards) for rank in range(size)]
        needed = [0] * size
        for num_live in range(1, num_shards + 1):
            steps = [plan_step(member, num_live) for member in members]
            assert [shard for step in steps for shard in step.live] == [*range(num_live)]
            assert len({step.nodes for step in steps}) == 1
            before, needed = needed, [max([0, *step.sets]) + 1 for step in steps]
            assert all(few <= many for few, many in zip(before, needed, strict=True))
            sent: list[tuple[int, int, int]] = []
            received: list[tuple[int, int, int]] = []
            for rank, tree in enumerate(trees(size, num_shards, num_live)):
                for hop in hops(tree):
                    peer, tag = hop.transfer.peer, hop.transfer.tag
                    assert 100 <= tag <= 100 + num_shards
                    (sent if hop.is_send else received).append(
                        (rank, peer, tag) if hop.is_send else (peer, rank, tag)
                    )
            assert sorted(sent) == sorted(received)
            assert len(set(sent)) == len(sent)
        assert [num_sets(member) for member in members] == needed


def close_to(case: Case, sums: list[bytes], step: int) -> bool:
    kinds = [case.dtype] * len(case.sizes) + [torch.float64]
    pairs = zip(sums, case.expected(step), kinds, strict=True)
    return all(
        torch.allclose(
            torch.frombuffer(bytearray(left), dtype=kind),
            torch.frombuffer(bytearray(right), dtype=kind),
            rtol=1e-5,
            atol=1e-5,
        )
        for left, right, kind in pairs
        if right
    )


CASES = [
    (1, Case(2, 2, SMALL)),
    (2, Case(2, 2)),
    (2, Case(5, 3, SMALL, divisor=3.0)),
    (3, Case(3, 3, SMALL)),
    (4, Case(6, 2, SMALL, num_rest=2)),
    (5, Case(5, 5, sizes=(0, 1, 7), num_rest=0, divisor=5.0)),
]


@pytest.mark.parametrize("all_reduce", ["ring", "native"])
@pytest.mark.parametrize(("size", "case"), CASES)
def test_all_members_end_with_the_same_bits_of_about_the_sum(
    all_reduce: str, size: int, case: Case
) -> None:
    """A ring sends each element as often as it must."""
    with links_of("gloo", size) as links:
        counting = [CountingLink(link) for link in links]
        sums = sums_of(counting if all_reduce == "ring" else links, case, range(2), all_reduce)
    assert all(each == sums[0] for each in sums)
    for step in range(2):
        assert close_to(case, sums[0][step], step)
    _, buckets = case.make_buckets()
    num_elements = sum(bucket.numel for bucket in buckets.layout.buckets)
    if all_reduce == "ring":
        assert sum(link.num_sent for link in counting) == 2 * 2 * (size - 1) * num_elements


def test_shared_memory_and_grpc_have_no_such_method() -> None:
    case = Case(2, 2)
    with (
        links_of("shm", 1) as (group,),
        pytest.raises(ValueError, match="ring all-reduce needs an engine that sends"),
    ):
        mesh_exchange(case.make_buckets()[1], group, 2, all_reduce="ring")
    with links_of("gloo", 1) as (link,):
        with pytest.raises(ValueError, match="no 'native' all-reduce over gloo"):
            mesh_exchange(case.make_buckets()[1], CountingLink(link), 2, all_reduce="native")
        with pytest.raises(ValueError, match="no 'tree' all-reduce"):
            mesh_exchange(case.make_buckets()[1], link, 2, all_reduce="tree")

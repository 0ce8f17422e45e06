"""The split into shards and the summation tree."""

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.numerics.shards import (
    Node,
    assign_shards,
    parent,
    split_node,
    split_rows,
    tree_nodes,
    tree_sum,
)

pytestmark = pytest.mark.core


def add32(left: float, right: float) -> float:
    """Addition rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", left + right))[0])


@given(st.integers(0, 1000), st.integers(1, 64))
def test_pieces_are_contiguous_even_and_empty_only_at_the_end(rows: int, shards: int) -> None:
    pieces = split_rows(rows, shards)
    assert [row for piece in pieces for row in piece] == list(range(rows))
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_the_left_child_is_the_largest_power_of_two_and_nodes_are_maximal() -> None:
    assert split_node(Node(0, 5)) == (Node(0, 4), Node(4, 5))
    assert split_node(Node(0, 8)) == (Node(0, 4), Node(4, 8))
    assert split_node(Node(4, 7)) == (Node(4, 6), Node(6, 7))
    with pytest.raises(ValueError, match="leaf"):
        split_node(Node(3, 4))
    for rows, shards in ((-1, 2), (3, 0)):
        with pytest.raises(ValueError, match="num_rows must be"):
            split_rows(rows, shards)
    assert tree_nodes(range(2), 4) == (Node(0, 2),)
    assert tree_nodes(range(1, 4), 4) == (Node(1, 2), Node(2, 4))
    assert tree_nodes(range(4), 3) == (Node(0, 3),)
    assert tree_nodes(range(3, 5), 5) == (Node(3, 4), Node(4, 5))
    assert tree_nodes(range(3, 5), 3) == ()
    assert tree_nodes(range(0), 3) == ()
    assert parent(Node(0, 2), Node(2, 3), 3) == Node(0, 3)
    assert parent(Node(1, 2), Node(2, 3), 4) is None
    assert parent(Node(0, 1), Node(2, 3), 4) is None
    assert parent(Node(0, 2), Node(2, 4), 3) is None
    with pytest.raises(ValueError, match="holds shard 2 of 3"):
        tree_sum({Node(0, 2): 1.0}, 3, add32)


@st.composite
def assignments(draw: st.DrawFn) -> tuple[list[float], list[range]]:
    numbers = st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100)
    values = draw(st.lists(numbers, min_size=1, max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(values)), max_size=8)))
    ends = [0, *cuts, len(values)]
    return values, [range(a, b) for a, b in pairwise(ends)]


@given(assignments())
def test_any_assignment_gives_the_same_bits(case: tuple[list[float], list[range]]) -> None:
    values, owned = case
    n = len(values)
    leaves = {Node(i, i + 1): value for i, value in enumerate(values)}
    partials = {}
    for shards in owned:
        for node in tree_nodes(shards, n):
            # a member sums inside its own node only, as a tree over the node's shards
            own = values[node.first : node.stop]
            inside = {Node(i, i + 1): value for i, value in enumerate(own)}
            partials[node] = tree_sum(inside, node.stop - node.first, add32)
    assert tree_sum(partials, n, add32).hex() == tree_sum(leaves, n, add32).hex()


@given(st.integers(1, 40), st.integers(0, 30))
def test_absent_leaves_are_pruned_from_a_larger_tree(n: int, num_absent: int) -> None:
    leaves = {Node(i, i + 1): f"{i}" for i in range(n)}
    total = tree_sum(leaves, n, lambda a, b: f"({a}+{b})")

    def larger(node: Node) -> str:
        if node.stop - node.first == 1:
            return f"{node.first}"
        left, right = split_node(node)
        return larger(left) if right.first >= n else f"({larger(left)}+{larger(right)})"

    assert larger(Node(0, n + num_absent)) == total


@given(st.integers(1, 40), st.integers(1, 10))
def test_members_cover_all_shards(shards: int, members: int) -> None:
    assert [s for owned in assign_shards(shards, members) for s in owned] == list(range(shards))

"""Split a batch into logical shards, and define the tree in which shards are summed.

Floating-point addition is not associative, so "the sum over shards" has defined bits only once the
order is fixed. The order is a binary tree over shard numbers that depends only on the number of
shards. Wherever shards are computed, the same tree is walked, so the same bits result. The module
is pure and depends on neither torch nor the network.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# ---- Shards ----

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the summation tree: the sum over the shards [first, stop)."""

    first: int
    stop: int


@lru_cache(maxsize=64)  # called in each step
def split_rows(num_rows: int, num_shards: int) -> tuple[range, ...]:
    """Cut num_rows rows into contiguous ranges whose sizes differ by at most one. The larger ranges
    come first, so with fewer rows than shards the empty ones are the last."""
    if num_rows < 0 or num_shards < 1:
        raise ValueError(
            f"num_rows must be >= 0 and num_shards >= 1, got {num_rows} and {num_shards}"
        )
    size, num_larger = divmod(num_rows, num_shards)
    starts = [i * size + min(i, num_larger) for i in range(num_shards + 1)]
    return tuple(range(starts[i], starts[i + 1]) for i in range(num_shards))


def assign_shards(num_shards: int, num_members: int) -> tuple[range, ...]:
    """Return the contiguous range of shards of each member, by rank, as even as possible."""
    return split_rows(num_shards, num_members)


def split_node(node: Node) -> tuple[Node, Node]:
    """Return the two children of an inner node of the summation tree.

    The left child holds the largest power of two of shards that leaves something for the right. So
    the tree over n leaves is the tree over any larger number with the absent leaves pruned.
    """
    size = node.stop - node.first
    if size < 2:
        raise ValueError(f"{node} is a leaf")
    middle = node.first + (1 << ((size - 1).bit_length() - 1))
    return Node(node.first, middle), Node(middle, node.stop)


def tree_nodes(owned: range, n: int) -> tuple[Node, ...]:
    """Return the smallest set of nodes of the summation tree over [0, n) that covers exactly the
    shards `owned`, in order. Shards at or beyond n are left out."""
    wanted = Node(owned.start, min(owned.stop, n))
    nodes: list[Node] = []

    def visit(node: Node) -> None:
        if node.stop <= wanted.first or wanted.stop <= node.first:
            return
        if wanted.first <= node.first and node.stop <= wanted.stop:
            nodes.append(node)
            return
        for child in split_node(node):
            visit(child)

    if n > 0 and wanted.first < wanted.stop:
        visit(Node(0, n))
    return tuple(nodes)


def parent(low: Node, high: Node, n: int) -> Node | None:
    """Return the node of the summation tree over [0, n) with these two children, or None."""
    candidate = Node(low.first, high.stop)
    if low.stop != high.first or tree_nodes(range(*candidate), n) != (candidate,):
        return None
    return candidate if split_node(candidate) == (low, high) else None


def tree_sum(partials: Mapping[Node, T], n: int, add: Callable[[T, T], T]) -> T:
    """Add the partial sums of nodes that cover the summation tree, and return the sum over [0, n).
    add(left, right) may overwrite left and return it."""

    def value(node: Node) -> T:
        if node in partials:
            return partials[node]
        if node.stop - node.first < 2:
            raise ValueError(f"no partial sum holds shard {node.first} of {n}")
        low, high = split_node(node)
        return add(value(low), value(high))

    return value(Node(0, n))


# ---- Sums of float64 ----
#
# Every device can reproduce the bits of these sums.
#
# Numbers are added over the binary tree of neighbours: 0 with 1, 2 with 3, and so on until one is
# left, a missing neighbour being 0. Any aligned power of two of them can be added alone, so a
# device works on blocks; rounding errors grow with log2 n.


def pairwise_sum(values: "NDArray[np.floating[Any]]") -> float:
    """Return the sum of values, (n,), in float64, added in tree order; 0 for none, never -0."""
    import numpy as np  # a job is read without it

    total = values.astype(np.float64)
    while total.size > 1:
        pairs = total[: total.size - total.size % 2]
        above = pairs[0::2] + pairs[1::2]
        total = np.append(above, total[-1] + 0.0) if total.size % 2 else above
    return float(total[0]) + 0.0 if total.size else 0.0

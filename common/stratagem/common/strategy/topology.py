"""Compute which nodes exchange parameters in gossip, and with what weights, in pure integers and
floats.

A topology string becomes an undirected graph, and the graph a symmetric doubly stochastic matrix
of Metropolis-Hastings weights (https://web.stanford.edu/~boyd/papers/pdf/fastavg.pdf). Repeated
edges and loops are left out, so a ring of 2 has one edge. A graph that is not connected is refused:
its nodes would never agree.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable
from typing import Final

from stratagem.common.base import ids
from stratagem.common.strategy.choices import KNOWN_TOPOLOGIES

MAX_DRAWS: Final = 100
"""The largest number of attempts to draw a random graph that is connected."""

MAX_LINKS: Final = 2**18
"""The largest number of edges: a dense graph would cost its reader minutes and gigabytes."""

Graph = tuple[tuple[int, ...], ...]
"""An adjacency list: for each node its neighbours, ascending, without the node itself."""


def graph_of(topology: str, num_nodes: int, seed: int) -> Graph:
    """Return the graph that a topology means for this many nodes.

    ring, complete, star (node 0 is the centre); torus:RxC, nodes row by row, where torus alone is
    the most square one; hypercube; exponential (i and i ± 2^m mod N; directed in some papers, both
    ways here); random:K (each node draws K others by the seed). Raises ValueError with the reason
    when the topology is unknown or does not fit.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be >= 1, got {num_nodes}")
    kind, _, argument = topology.partition(":")
    match kind:
        case "ring" if not argument:
            edges = [(i, (i + 1) % num_nodes) for i in range(num_nodes)]
        case "complete" if not argument:
            _check_links(topology, num_nodes, num_nodes * (num_nodes - 1) // 2)
            edges = [(i, j) for i in range(num_nodes) for j in range(i)]
        case "star" if not argument:
            edges = [(0, i) for i in range(1, num_nodes)]
        case "torus":
            edges = _torus(*_torus_shape(argument, num_nodes))
        case "hypercube" if not argument:
            edges = _hypercube(num_nodes)
        case "exponential" if not argument:
            hops = [1 << m for m in range((num_nodes - 1).bit_length())]
            edges = [(i, (i + hop) % num_nodes) for i in range(num_nodes) for hop in hops]
        case "random":
            return _random(argument, num_nodes, seed)
        case _:
            raise _unknown(topology)
    return _graph(edges, num_nodes)


def metropolis_hastings(graph: Graph) -> tuple[dict[int, float], ...]:
    """Return for each node its mixing weights, keyed by node number: its own and its neighbours'.
    w_ij = 1 / (1 + max(d_i, d_j)) for neighbours, and what is left for the node itself."""
    weights = []
    for node, neighbours in enumerate(graph):
        shares = {
            other: 1.0 / (1 + max(len(neighbours), len(graph[other]))) for other in neighbours
        }
        shares[node] = 1.0 - math.fsum(shares.values())
        weights.append(dict(sorted(shares.items())))
    return tuple(weights)


def is_connected(graph: Graph) -> bool:
    """Return whether every node can be reached from node 0."""
    seen, waiting = {0}, [0]
    while waiting:
        new = set(graph[waiting.pop()]) - seen
        seen |= new
        waiting += new
    return len(seen) == len(graph)


def _graph(edges: Iterable[tuple[int, int]], num_nodes: int) -> Graph:
    neighbours: list[set[int]] = [set() for _ in range(num_nodes)]
    for i, j in edges:
        if i != j:
            neighbours[i].add(j)
            neighbours[j].add(i)
    return tuple(tuple(sorted(neighbour)) for neighbour in neighbours)


def _torus_shape(argument: str, num_nodes: int) -> tuple[int, int]:
    if not argument:
        rows = max(r for r in range(1, math.isqrt(num_nodes) + 1) if num_nodes % r == 0)
        return rows, num_nodes // rows
    rows, columns = _numbers(f"torus:{argument}", argument.split("x"), 2)
    if rows * columns != num_nodes:
        raise ValueError(f"torus:{argument} has {rows * columns} nodes, not {num_nodes}")
    return rows, columns


def _torus(rows: int, columns: int) -> list[tuple[int, int]]:
    places = [(r, c) for r in range(rows) for c in range(columns)]
    right = [(r * columns + c, r * columns + (c + 1) % columns) for r, c in places]
    down = [(r * columns + c, (r + 1) % rows * columns + c) for r, c in places]
    return right + down


def _hypercube(num_nodes: int) -> list[tuple[int, int]]:
    if num_nodes & (num_nodes - 1):
        raise ValueError(f"a hypercube needs a power of two of nodes, not {num_nodes}")
    dimensions = num_nodes.bit_length() - 1
    return [(i, i ^ (1 << bit)) for i in range(num_nodes) for bit in range(dimensions)]


def _random(argument: str, num_nodes: int, seed: int) -> Graph:
    (degree,) = _numbers(f"random:{argument}", [argument], 1)
    if degree >= num_nodes:
        raise ValueError(
            f"random:{degree} needs at least {degree + 1} nodes to draw from, not {num_nodes}"
        )
    _check_links(f"random:{degree}", num_nodes, degree * num_nodes)
    for draw in range(MAX_DRAWS):
        graph = _graph(_drawn_edges(degree, num_nodes, seed, draw), num_nodes)
        if is_connected(graph):
            return graph
    raise ValueError(
        f"random:{degree} gave no connected graph of {num_nodes} nodes in {MAX_DRAWS} draws; "
        "take a larger K"
    )


def _drawn_edges(degree: int, num_nodes: int, seed: int, draw: int) -> list[tuple[int, int]]:
    """Draw `degree` random neighbours for each node by hashes, which no library version changes."""
    edges = []
    for i in range(num_nodes):
        others: set[int] = set()
        for attempt in itertools.count():
            if len(others) == degree:
                break
            lot = hashlib.sha256(f"{seed}/{draw}/{i}/{attempt}".encode()).digest()
            other = int.from_bytes(lot[:8], "big") % num_nodes
            others |= {other} - {i}
        edges += [(i, other) for other in others]
    return edges


def _check_links(topology: str, num_nodes: int, num_links: int) -> None:
    if num_links > MAX_LINKS and ids.are_checked():
        raise ValueError(
            f"{topology} has {num_links} links between {num_nodes} nodes; at most {MAX_LINKS}"
        )


def _numbers(topology: str, words: list[str], count: int) -> list[int]:
    numbers = [int(word) for word in words if word.isascii() and word.isdecimal()]
    if len(words) != count or len(numbers) != count or min(numbers) < 1:
        raise _unknown(topology)
    return numbers


def _unknown(topology: str) -> ValueError:
    return ValueError(f"{topology!r} is unknown; known topologies: {KNOWN_TOPOLOGIES}")

"""Topologies and their mixing matrices: the invariants that gossip rests on."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stratagem.common.strategy.choices import KNOWN_TOPOLOGIES
from stratagem.common.strategy.topology import Graph, graph_of, is_connected, metropolis_hastings

pytestmark = pytest.mark.core

ANY_SIZE = ["ring", "complete", "star", "torus", "exponential"]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    num_nodes = draw(st.integers(1, 24))
    fitting = [*ANY_SIZE, f"torus:1x{num_nodes}", f"torus:{num_nodes}x1"]
    if num_nodes & (num_nodes - 1) == 0:
        fitting.append("hypercube")
    if num_nodes > 1:
        fitting.append(f"random:{draw(st.integers(1, num_nodes - 1))}")
    topology, seed = draw(st.sampled_from(fitting)), draw(st.integers(0, 2**31))
    try:
        return graph_of(topology, num_nodes, seed)
    except ValueError as error:
        assume("no connected graph" not in str(error))
        raise


def matrix(graph: Graph) -> np.ndarray:
    weights = np.zeros((len(graph), len(graph)))
    for i, row in enumerate(metropolis_hastings(graph)):
        for j, weight in row.items():
            weights[i, j] = weight
    return weights


@settings(max_examples=60)
@given(graphs(), st.integers(0, 2**31))
def test_graphs_are_undirected_and_mixing_keeps_the_mean(graph: Graph, seed: int) -> None:
    assert is_connected(graph)
    for i, neighbours in enumerate(graph):
        assert list(neighbours) == sorted(set(neighbours) - {i}), "no loops and no repeats"
        assert all(i in graph[j] for j in neighbours)
    weights = matrix(graph)
    assert np.array_equal(weights, weights.T)
    assert (weights >= 0).all()
    assert (np.diag(weights) > 0).all()
    np.testing.assert_allclose(weights.sum(0), 1.0, rtol=0, atol=1e-15 * len(graph))
    np.testing.assert_allclose(weights.sum(1), 1.0, rtol=0, atol=1e-15 * len(graph))
    for row in metropolis_hastings(graph):
        assert list(row) == sorted(row)
    size = len(graph)
    values = np.random.default_rng(seed).normal(size=size)
    mixed = weights @ values
    np.testing.assert_allclose(mixed.mean(), values.mean(), atol=1e-14)
    np.testing.assert_allclose(weights @ np.full(size, 3.7), 3.7, rtol=1e-14)
    rate = sorted(abs(np.linalg.eigvalsh(weights)))[-2] if size > 1 else 0.0
    assert rate < 1
    before = np.linalg.norm(values - values.mean())
    after = np.linalg.norm(mixed - mixed.mean())
    assert after <= rate * before + 1e-12


@pytest.mark.parametrize(
    ("topology", "num_nodes", "expected"),
    [
        ("ring", 1, ((),)),
        ("ring", 2, ((1,), (0,))),
        ("ring", 4, ((1, 3), (0, 2), (1, 3), (0, 2))),
        ("star", 4, ((1, 2, 3), (0,), (0,), (0,))),
        ("complete", 3, ((1, 2), (0, 2), (0, 1))),
        ("torus", 4, ((1, 2), (0, 3), (0, 3), (1, 2))),
        ("torus:1x3", 3, ((1, 2), (0, 2), (0, 1))),
        ("torus:3x2", 6, ((1, 2, 4), (0, 3, 5), (0, 3, 4), (1, 2, 5), (0, 2, 5), (1, 3, 4))),
        ("hypercube", 1, ((),)),
        ("hypercube", 4, ((1, 2), (0, 3), (0, 3), (1, 2))),
        ("exponential", 5, ((1, 2, 3, 4), (0, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 4), (0, 1, 2, 3))),
        ("exponential", 1, ((),)),
    ],
)
def test_graphs_by_hand(topology: str, num_nodes: int, expected: Graph) -> None:
    assert graph_of(topology, num_nodes, 0) == expected


def test_random_graphs_follow_the_seed_and_never_change() -> None:
    assert graph_of("random:2", 9, 1) == graph_of("random:2", 9, 1)
    assert len({graph_of("random:2", 9, seed) for seed in range(20)}) > 10
    assert all(len(row) >= 2 for row in graph_of("random:2", 9, 1))
    # Journals of earlier versions must mean the same graph.
    assert graph_of("random:1", 6, 0) == PINNED
    weights = metropolis_hastings(graph_of("star", 3, 0))
    assert weights[1] == {0: 1 / 3, 1: 1 - 1 / 3}
    assert weights[0][1] == weights[0][2] == 1 / 3
    for name in KNOWN_TOPOLOGIES.replace("RxC", "2x2").replace("K", "2").split(", "):
        assert len(graph_of(name, 4, 0)) == 4


PINNED = ((3, 5), (2,), (1, 4), (0, 4), (2, 3, 5), (0, 4))


@pytest.mark.parametrize(
    ("topology", "num_nodes", "reason"),
    [
        ("torus:2x3", 5, "torus:2x3 has 6 nodes, not 5"),
        ("hypercube", 6, "a hypercube needs a power of two of nodes, not 6"),
        ("random:4", 4, "random:4 needs at least 5 nodes to draw from, not 4"),
        *((bad, 4, "is unknown; known topologies: ring") for bad in ("", "line", "ring:2")),
        *((bad, 4, "is unknown") for bad in ("random", "random:0", "torus:x", "torus:2x2x1")),
    ],
)
def test_what_does_not_fit_says_the_reason(topology: str, num_nodes: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        graph_of(topology, num_nodes, 0)


def test_random_graph_is_drawn_again_until_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = {seed: graph_of("random:1", 30, seed) for seed in range(20)}
    monkeypatch.setattr("stratagem.common.strategy.topology.MAX_DRAWS", 1)
    refused = 0
    for seed, graph in graphs.items():
        try:
            assert graph_of("random:1", 30, seed) == graph
        except ValueError as error:
            assert "no connected graph of 30 nodes in 1 draws; take a larger K" in str(error)  # noqa: PT017
            refused += 1
    assert 0 < refused < len(graphs)

"""Graph documents: ids, edges, cycles, nesting, and which strategy holds where."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.common.job import EdgeSpec, GraphSpec, JobSpec, NodeSpec, effective_strategy
from stratagem.common.strategy import AllReduce, DataParallel, Local
from tests.common.job.documents import MINIMAL
from tests.common.model.graph_documents import edges, nodes
from tests.common.strategy.documents import DATA_PARALLEL as PARALLEL

pytestmark = pytest.mark.core


def wrong(document: dict[str, Any]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        GraphSpec.parse(document)
    return str(caught.value)


def test_a_graph_with_a_subgraph_as_a_node() -> None:
    inner = {"nodes": nodes("a", "b"), "edges": edges("a>b")}
    graph = GraphSpec.parse(
        {
            "nodes": [*nodes("head"), {"id": "in", "module": "Flatten", "trainable": False}],
            "edges": edges("in>body", "body>head"),
            "subgraphs": [{"id": "body", "graph": inner}],
        }
    )
    assert graph.topological_order() == ["in", "body", "head"]
    assert (graph.input_ids(), graph.output_ids()) == (["in"], ["head"])
    assert graph.subgraphs[0].graph.topological_order() == ["a", "b"]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, "nodes: must not be empty"),
        ({"nodes": nodes("a", "a")}, "nodes[1].id: 'a' is taken already"),
        (
            {"nodes": nodes("a"), "subgraphs": [{"id": "a", "graph": {"nodes": nodes("x")}}]},
            "subgraphs[0].id: 'a' is taken already",
        ),
        (
            {"nodes": nodes("conv", "out"), "edges": edges("cnv>out", "conv>x")},
            "edges[0].source: 'cnv' is not a node of this graph; did you mean conv?; "
            "edges[1].target: 'x' is not a node of this graph",
        ),
        ({"nodes": nodes("a"), "edges": edges("a>a")}, "edges: cycle a -> a"),
        (
            {"nodes": nodes("a", "b", "c", "d"), "edges": edges("a>b", "b>c", "c>d", "d>b")[:]},
            "edges[3].port: port 0 of 'b' is fed already",
        ),
        (
            {
                "nodes": nodes("a", "b", "c"),
                "edges": [*edges("a>b", "b>c"), {"source": "c", "target": "b", "port": 1}],
            },
            "edges: cycle b -> c -> b",
        ),
        ({"nodes": nodes("a"), "inputs": ["b"]}, "inputs[0]: 'b' is not a node of this graph"),
        ({"nodes": nodes("a.b")}, "nodes[0].id: 'a.b' is not 1 to 64 of A-Z, a-z, 0-9, '_', '-'"),
        ({"nodes": [{"id": "a", "module": "os.system"}]}, "nodes[0].module: 'os.system' is not th"),
        ({"nodes": [{"id": "a", "module": "Linear", "kwarg": {}}]}, "nodes[0].kwarg: unknown key"),
        (
            {
                "nodes": nodes("a"),
                "subgraphs": [
                    {"id": "s", "graph": {"nodes": nodes("x", "y"), "edges": edges("x>y", "y>z")}}
                ],
            },
            "subgraphs[0].graph.edges[1].target: 'z' is not a node of this graph",
        ),
        (
            {"nodes": nodes("a"), "training_strategy": {"type": "Lokal"}},
            "training_strategy.type: 'Lokal' is not one of Local, DataParallel, ModelParallel, ",
        ),
    ],
)
def test_unsound_graphs_are_refused(document: dict[str, Any], expected: str) -> None:
    assert wrong(document).startswith(expected)


def test_a_strategy_is_inherited_unless_a_subgraph_sets_its_own() -> None:
    leaf = {"nodes": nodes("x")}
    graph = GraphSpec.parse(
        {
            "training_strategy": PARALLEL,
            "subgraphs": [
                {"id": "plain", "graph": {"subgraphs": [{"id": "deep", "graph": leaf}]}},
                {"id": "null", "graph": {**leaf, "training_strategy": None}},
                {
                    "id": "own",
                    "graph": {
                        "training_strategy": {"type": "Local"},
                        "subgraphs": [{"id": "deep", "graph": leaf}],
                    },
                },
            ],
        }
    )
    parallel = DataParallel(2, AllReduce())
    assert effective_strategy(graph) == parallel
    for path in ("plain", "plain/deep", "null"):
        assert effective_strategy(graph, path) == parallel
    for path in ("own", "own/deep"):
        assert effective_strategy(graph, path) == Local()
    with pytest.raises(NotFoundError, match="did you mean plain"):
        effective_strategy(graph, "plane/deep")
    graph = GraphSpec(nodes=(NodeSpec(id="a", module="Linear"),))
    assert effective_strategy(graph) == Local()
    assert effective_strategy(graph, inherited=parallel) == parallel


def test_the_strategy_of_the_graph_is_the_strategy_of_the_job() -> None:
    document = {**MINIMAL, "model": {"graph": {"nodes": nodes("a"), "training_strategy": PARALLEL}}}
    job = JobSpec.parse(document)
    assert job.strategy == DataParallel(2, AllReduce())
    assert JobSpec.from_json(job.canonical_json()) == job
    with pytest.raises(InvalidInputError, match="training_strategy: differs from strategy"):
        JobSpec.parse({**document, "strategy": {"type": "Local"}})
    graph = {"nodes": nodes("a"), "training_strategy": None}
    unset = JobSpec.parse({**MINIMAL, "model": {"graph": graph}})
    assert unset.strategy == Local()
    assert "training_strategy" not in unset.canonical_json()


@given(st.permutations(range(6)), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_the_order_puts_every_source_first(rank: list[int], pairs: set[tuple[int, int]]) -> None:
    forward = sorted((a, b) for a, b in pairs if rank[a] < rank[b])
    graph = GraphSpec(
        nodes=tuple(NodeSpec(id=str(i), module="Linear") for i in range(6)),
        edges=tuple(EdgeSpec(source=str(a), target=str(b), port=a) for a, b in forward),
    )
    order = graph.topological_order()
    assert sorted(order) == [str(i) for i in range(6)]
    assert all(order.index(str(a)) < order.index(str(b)) for a, b in forward)

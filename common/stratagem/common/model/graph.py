"""A model as data: named nodes of torch modules, edges between them, nested subgraphs.

The module has the form of the document, its checks (unique ids, known ends, no cycle) and the
look-up of the strategy of a subgraph. It knows no torch module: the worker that builds the model
decides which names are allowed. Parameters are called `<node id>.<name>`, those of a subgraph
`<subgraph id>.<node id>.<name>`.
"""

import re
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Annotated, Final, TypeAlias

from pydantic import AfterValidator

from stratagem.common.base.errors import MAX_VIOLATIONS, InvalidInputError, NotFoundError, Violation
from stratagem.common.schema.document import Items, Kwargs, Section, Whole
from stratagem.common.schema.json import FrozenDict, suggest
from stratagem.common.schema.rules import rule
from stratagem.common.strategy import Local, Strategy
from stratagem.common.strategy.strategies import StrategyField

MAX_COMPARED: Final = 10_000

_NODE_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_MODULE: Final = re.compile(r"[A-Za-z]\w{0,63}")


def _check_node_id(value: str) -> str:
    # no dot: it separates the parts of a parameter's name
    if not _NODE_ID.fullmatch(value):
        raise InvalidInputError(f"{value!r} is not 1 to 64 of A-Z, a-z, 0-9, '_', '-'")
    return value


def _check_module(value: str) -> str:
    if not _MODULE.fullmatch(value):
        raise InvalidInputError(f"{value!r} is not the name of a module, such as Linear")
    return value


NodeId: TypeAlias = Annotated[str, AfterValidator(_check_node_id)]


class NodeSpec(Section):
    """A node of the graph: one module; `trainable: false` freezes its parameters."""

    id: NodeId
    module: Annotated[str, AfterValidator(_check_module)]
    kwargs: Kwargs = FrozenDict()
    trainable: bool = True


class EdgeSpec(Section):
    """The output of `source` is input number `port` of `target`; both may be subgraphs."""

    source: NodeId
    target: NodeId
    port: Whole = 0


class SubgraphSpec(Section):
    """A graph that is one node of the graph around it."""

    id: NodeId
    graph: "GraphSpec"


class GraphSpec(Section):
    """A whole graph. Without `inputs` or `outputs`, they are the nodes without edges in or out."""

    nodes: Items[NodeSpec] = ()
    edges: Items[EdgeSpec] = ()
    subgraphs: Items[SubgraphSpec] = ()
    inputs: Items[NodeId] = ()
    outputs: Items[NodeId] = ()
    training_strategy: StrategyField | None = None

    @rule
    def _is_sound(self) -> list[Violation]:
        return graph_violations(self)

    def node_ids(self) -> list[str]:
        """Return the ids of the nodes, then of the subgraphs, in declared order."""
        return [node.id for node in self.nodes] + [subgraph.id for subgraph in self.subgraphs]

    def input_ids(self) -> list[str]:
        """Return the nodes that receive the input of the graph."""
        targets = {edge.target for edge in self.edges}
        return list(self.inputs) or [
            node_id for node_id in self.node_ids() if node_id not in targets
        ]

    def output_ids(self) -> list[str]:
        """Return the nodes whose outputs are the output of the graph."""
        sources = {edge.source for edge in self.edges}
        return list(self.outputs) or [
            node_id for node_id in self.node_ids() if node_id not in sources
        ]

    def num_nodes(self) -> int:
        """Return the number of nodes at all levels; each subgraph counts as a node, too."""
        return len(self.nodes) + sum(1 + subgraph.graph.num_nodes() for subgraph in self.subgraphs)

    def topological_order(self) -> list[str]:
        """Return all ids in topological order; ties are broken by order of declaration."""
        return _sorted_ids(self)[0]


def graph_violations(graph: GraphSpec) -> list[Violation]:
    """Return the violations of one graph, without those of its subgraphs."""
    if not graph.nodes and not graph.subgraphs:
        return [Violation("nodes", "must not be empty")]
    violations = [*_duplicate_ids(graph), *_unknown_ends(graph), *_ports_fed_twice(graph)]
    if not violations and (cycle := _cycle(graph)):
        violations.append(Violation("edges", f"cycle {' -> '.join(cycle)}"))
    return violations


def effective_strategy(
    graph: GraphSpec, path: str = "", inherited: Strategy | None = None
) -> Strategy:
    """Return the strategy of the subgraph at a path such as "encoder/block1" ("" = the graph
    itself).

    A graph without a strategy has that of the graph around it, the outermost one `inherited` or
    Local.
    """
    strategy = graph.training_strategy or inherited or Local()
    for part in path.split("/") if path else ():
        graph = next(
            (subgraph.graph for subgraph in graph.subgraphs if subgraph.id == part), None
        ) or _absent(graph, path, part)
        strategy = graph.training_strategy or strategy
    return strategy


def _absent(graph: GraphSpec, path: str, part: str) -> GraphSpec:
    ids = [subgraph.id for subgraph in graph.subgraphs]
    raise NotFoundError(
        f"subgraph {path}: no {part!r} among {', '.join(ids) or 'no subgraphs'}{suggest(part, ids)}"
    )


def _duplicate_ids(graph: GraphSpec) -> list[Violation]:
    violations, seen = [], set()
    for group, items in (("nodes", graph.nodes), ("subgraphs", graph.subgraphs)):
        for i, item in enumerate[NodeSpec | SubgraphSpec](items):
            if item.id in seen:
                violations.append(Violation(f"{group}[{i}].id", f"{item.id!r} is taken already"))
            seen.add(item.id)
    return violations


def _unknown_ends(graph: GraphSpec) -> list[Violation]:
    named: list[tuple[str, str]] = []
    for i, edge in enumerate(graph.edges):
        named += [(f"edges[{i}].source", edge.source), (f"edges[{i}].target", edge.target)]
    for group, ids in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        named += [(f"{group}[{i}]", node) for i, node in enumerate(ids)]
    node_ids = set(graph.node_ids())
    unknown = [(field, name) for field, name in named if name not in node_ids]
    # The search for a similar name among thousands would take a while.
    similar = sorted(node_ids) if len(node_ids) * len(unknown) < MAX_COMPARED else []
    return [
        Violation(field, f"{name!r} is not a node of this graph{suggest(name, similar)}")
        for field, name in unknown[:MAX_VIOLATIONS]
    ]


def _ports_fed_twice(graph: GraphSpec) -> list[Violation]:
    violations, fed = [], set()
    for i, edge in enumerate(graph.edges):
        if (edge.target, edge.port) in fed:
            text = f"port {edge.port} of {edge.target!r} is fed already"
            violations.append(Violation(f"edges[{i}].port", text))
        fed.add((edge.target, edge.port))
    return violations


def _sorted_ids(graph: GraphSpec) -> tuple[list[str], dict[str, list[str]]]:
    """Return a stable topological order (Kahn), and the unsorted sources of each id left out."""
    position = {node: i for i, node in enumerate(graph.node_ids())}
    sources: dict[str, list[str]] = {node: [] for node in position}
    targets: dict[str, list[str]] = {node: [] for node in position}
    for edge in graph.edges:
        sources[edge.target].append(edge.source)
        targets[edge.source].append(edge.target)
    num_missing = {node: len(feeding) for node, feeding in sources.items()}
    ready = [(position[node], node) for node, count in num_missing.items() if not count]
    heapify(ready)
    order: list[str] = []
    while ready:
        order.append(heappop(ready)[1])
        for target in targets[order[-1]]:
            num_missing[target] -= 1
            if not num_missing[target]:
                heappush(ready, (position[target], target))
    done = set(order)
    unsorted = {
        node: [source for source in feeding if source not in done]
        for node, feeding in sources.items()
        if node not in done
    }
    return order, unsorted


def _cycle(graph: GraphSpec) -> Sequence[str]:
    """Return the ids along one cycle, the first repeated at the end; empty if there is none."""
    unsorted = _sorted_ids(graph)[1]
    if not unsorted:
        return ()
    # each remaining node has a remaining source, so going backwards must come round
    path = [next(iter(unsorted))]
    while (source := unsorted[path[-1]][0]) not in path:
        path.append(source)
    return [source, *reversed(path[path.index(source) :])]

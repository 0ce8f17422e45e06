"""A model as a flat list of calls, each a node and the sources of its inputs, in order.

Stages are cut from the list. Nested graphs are flattened into it, so that a cut may go through a
subgraph; a chain of modules is the simplest list. Every use of a node's output has a number: the
gradients of the uses are added in falling order of it, wherever the uses are computed, so a cut
changes no sum. The module must not import torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.model.graph import GraphSpec


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The input of the model, as the model is called with it."""


@dataclass(frozen=True, slots=True)
class FromNode:
    """The output of a node, used as an input; `use` numbers its uses in program order, from 0."""

    node: str
    use: int = 0


@dataclass(frozen=True, slots=True)
class NodeInput:
    """One of `count` inputs that one value feeds: it gets item `index` of a tuple, or else the
    whole value."""

    of: "Source"
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """A tuple of several sources (node outputs, model inputs), used as one value."""

    parts: "tuple[Source, ...]"


Source: TypeAlias = ModelInput | FromNode | NodeInput | Bundle


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one node's module. node: the id, or path in nested graphs, such as enc/fc."""

    node: str
    args: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class ModelProgram:
    """A model as a list of calls, in order of dependence, and the source of its output."""

    calls: tuple[Call, ...]
    output: Source
    num_uses: Mapping[str, int]
    """The number of uses of each node's output; being the model's output counts as the last use."""


def make_program(calls: Sequence[Call], output: Source) -> ModelProgram:
    """Make a program from calls in order, and number the uses of each node's output."""
    num_uses = {call.node: 0 for call in calls}

    def number(source: Source) -> Source:
        match source:
            case FromNode(node):
                num_uses[node] += 1
                return FromNode(node, num_uses[node] - 1)
            case NodeInput(of, index, count):
                return NodeInput(number(of), index, count)
            case Bundle(parts):
                return Bundle(tuple(number(part) for part in parts))
            case ModelInput():
                return source

    numbered = tuple(Call(call.node, tuple(number(arg) for arg in call.args)) for call in calls)
    return ModelProgram(numbered, number(output), num_uses)


def chain(nodes: Sequence[str]) -> ModelProgram:
    """Return the program of a linear chain: each node is fed by the one before it."""
    sources: list[Source] = [ModelInput(), *(FromNode(node) for node in nodes)]
    calls = [Call(node, (source,)) for node, source in zip(nodes, sources, strict=False)]
    return make_program(calls, sources[-1])


def flatten(graph: GraphSpec) -> ModelProgram:
    """Return the program of a graph and all graphs nested in it. Raises InvalidInputError."""
    calls: list[Call] = []
    output = _inline(graph, "", (ModelInput(),), calls)
    return make_program(calls, output)


def leaves(source: Source) -> Iterator[FromNode | ModelInput]:
    """Yield the node outputs and model inputs that a call's argument is made of, in order."""
    match source:
        case FromNode() | ModelInput():
            yield source
        case NodeInput(of=of):
            yield from leaves(of)
        case Bundle(parts):
            for part in parts:
                yield from leaves(part)


def _inline(graph: GraphSpec, prefix: str, given: tuple[Source, ...], calls: list[Call]) -> Source:
    inputs = graph.input_ids()
    fed = dict(zip(inputs, _split(given, len(inputs), prefix), strict=True))
    subgraphs = {subgraph.id: subgraph.graph for subgraph in graph.subgraphs}
    edges = sorted(graph.edges, key=lambda edge: edge.port)
    values: dict[str, Source] = {}
    for name in graph.topological_order():
        args = [fed[name]] if name in fed else []
        args += [values[edge.source] for edge in edges if edge.target == name]
        if name in subgraphs:
            values[name] = _inline(subgraphs[name], f"{prefix}{name}/", tuple(args), calls)
        else:
            calls.append(Call(prefix + name, tuple(args)))
            values[name] = FromNode(prefix + name)
    outputs = tuple(values[name] for name in graph.output_ids())
    return outputs[0] if len(outputs) == 1 else Bundle(outputs)


def _split(given: tuple[Source, ...], count: int, prefix: str) -> tuple[Source, ...]:
    """Return the source of each input node of a graph; a single given source feeds them all."""
    if len(given) == 1 and isinstance(given[0], Bundle):
        given = given[0].parts
    if len(given) == 1:
        return tuple(NodeInput(given[0], index, count) for index in range(count))
    if len(given) != count:
        where = prefix.rstrip("/") or "the graph"
        raise InvalidInputError.at(
            "model.graph", f"{where} has {count} inputs, {len(given)} were given"
        )
    return given

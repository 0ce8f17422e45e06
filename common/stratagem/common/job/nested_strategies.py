"""The strategies of subgraphs, as strategies inside the job's own.

A subgraph that has no strategy inherits that of the graph around it. One with another strategy must
hold all that is trained; its strategy then runs inside the outer one, exactly as if it stood in the
outer one's `options.inner`. Other mixes are refused: two strategies for two halves of one step
would have to agree on every gradient.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Final

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.model.graph import GraphSpec, NodeSpec, SubgraphSpec
from stratagem.common.strategy import Local, Strategy, describe

# fmt: off
WITHOUT_PARAMETERS: Final = frozenset({
    "LocalResponseNorm", "ReLU", "ReLU6", "LeakyReLU", "RReLU", "ELU", "SELU", "CELU", "GELU",
    "SiLU", "Mish", "Sigmoid", "Tanh", "Softplus", "Softsign", "Softmax", "LogSoftmax", "Hardtanh",
    "Hardswish", "Hardsigmoid", "LogSigmoid", "GLU", "Threshold",
    "MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d",
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d", "AdaptiveMaxPool3d",
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout",
    "Flatten", "Unflatten", "Identity", "Upsample", "PixelShuffle", "PixelUnshuffle", "ZeroPad2d",
    "ConstantPad1d", "ConstantPad2d", "ReflectionPad2d", "ReplicationPad2d",
    "Add", "Multiply", "Concat", "Select", "Permute", "Mean",
})
"""Modules of a graph that have nothing to train."""
# fmt: on


def effective(strategy: Strategy, graph: GraphSpec) -> Strategy:
    """The job's strategy with those of subgraphs inside it; raises where they cannot be."""
    return _within(strategy, strategy, graph, graph, "model.graph")


def _within(
    whole: Strategy, current: Strategy, graph: GraphSpec, root: GraphSpec, path: str
) -> Strategy:
    """`whole` after all subgraphs below; `current` is the innermost strategy so far."""
    for sub in graph.subgraphs:
        place = f"{path}.subgraphs.{sub.id}"
        own = sub.graph.training_strategy
        inner = current
        if own is not None and own != current:
            _must_hold_all(sub, root, place, own, current)
            whole = _nested(whole, own, place)
            inner = own
        whole = _within(whole, inner, sub.graph, root, place)
    return whole


def _must_hold_all(
    sub: SubgraphSpec, root: GraphSpec, place: str, own: Strategy, outer: Strategy
) -> None:
    inside = {id(node) for node in _trained(sub.graph)}
    outside = [node.id for node in _trained(root) if id(node) not in inside]
    if outside:
        raise InvalidInputError.at(
            f"{place}.training_strategy",
            f"{describe(own)} differs from {describe(outer)} around it, and the subgraph does not "
            f"hold all that is trained: {', '.join(map(repr, outside))} is outside",
        )


def _trained(graph: GraphSpec) -> Iterator[NodeSpec]:
    yield from (node for node in graph.nodes if node.module not in WITHOUT_PARAMETERS)
    for sub in graph.subgraphs:
        yield from _trained(sub.graph)


def _nested(whole: Strategy, own: Strategy, place: str) -> Strategy:
    """The strategy with `own` at the innermost place that can hold one."""
    if isinstance(whole, Local):
        return own
    options = getattr(whole, "options", None)
    if options is None or "inner" not in {field.name for field in fields(options)}:
        message = f"{describe(own)} cannot run inside {describe(whole)}, which holds no other one"
        raise InvalidInputError(violations=[Violation(f"{place}.training_strategy", message)])
    if options.inner == own:
        return whole  # said twice: in the graph and in the strategy
    inner = own if options.inner is None else _nested(options.inner, own, place)
    return replace(whole, options=replace(options, inner=inner))

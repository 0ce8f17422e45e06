"""Reduce nested strategies of a job to the one strategy that is carried out.

`flat` turns groups of replicas inside replicas into the replicas of one flat strategy. Adding group
by group would give other bits; which process adds which shards is decided by the exchange and does
not change the sum.

`effective` gives a subgraph without a strategy the strategy of the enclosing graph. A subgraph with
another strategy must hold all that is trained; its strategy then runs inside the outer one, exactly
as if it stood in the outer one's `options.inner`. Stages of a pipeline that are all replicated
alike are replicas of the whole pipeline. Other mixes are refused.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, Final

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.model.graph import GraphSpec, NodeSpec, SubgraphSpec
from stratagem.common.schema.document import refuse
from stratagem.common.strategy import (
    DataParallel,
    DataParallelOptions,
    Decentralized,
    Local,
    ModelParallel,
    Strategy,
    describe,
    levels,
)
from stratagem.common.strategy.strategies import MAX_REPLICAS

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
"""The module types in a graph that have no parameters to train."""
# fmt: on


_OF_GROUPS: Final = ("min_replicas", "inner")
"""The options of DataParallel that may differ between a group of replicas and the groups inside."""


# ---- Groups of replicas ----


def flat(strategy: Strategy, path: str = "strategy") -> Strategy:
    """Return the strategy with nested groups of replicas replaced by one flat set of replicas, at
    any depth. Raises InvalidInputError if no flat strategy does the same."""
    within: Strategy | None = getattr(strategy.options, "inner", None)
    if within is None:
        return strategy
    path = f"{path}.options.inner"
    inner = flat(within, path)
    if isinstance(strategy, DataParallel) and isinstance(inner, DataParallel):
        refuse(list(_why_not_flat(strategy, inner, path)))
        options = replace(
            strategy.options,
            min_replicas=strategy.options.min_replicas * inner.options.min_replicas,
            inner=inner.options.inner,
        )
        num_replicas = strategy.num_replicas * inner.num_replicas
        return replace(strategy, num_replicas=num_replicas, options=options)
    return strategy if inner is within else _around(strategy, inner)


def _why_not_flat(outer: DataParallel, inner: DataParallel, path: str) -> Iterator[Violation]:
    """Yield an error for each option at `path` that keeps two nested strategies from being one."""
    methods = type(outer.aggregation).__name__, type(inner.aggregation).__name__
    if isinstance(outer.aggregation, Decentralized):
        text = "a node of Decentralized is one worker, and cannot be a group of replicas"
        yield Violation(path, text)
    elif isinstance(inner.aggregation, Decentralized):
        text = "nodes of Decentralized have a model each, and no gradient to be summed around them"
        yield Violation(f"{path}.aggregation.method", text)
    elif methods[0] != methods[1]:
        text = f"{methods[1]} inside {methods[0]}: all groups make one sum, in one way; give both "
        yield Violation(f"{path}.aggregation.method", f"{text}the same")
    if inner.options.local_steps is not None:
        text = "replicas with local_steps have no gradient in each step to be summed around them"
        yield Violation(f"{path}.options.local_steps", text)
        return
    for name in (item.name for item in fields(DataParallelOptions) if item.name not in _OF_GROUPS):
        within, around = getattr(inner.options, name), getattr(outer.options, name)
        if within != around:
            text = f"{within!r} inside {around!r}: all groups make one sum; give both the same"
            yield Violation(f"{path}.options.{name}", text)
    num_replicas = outer.num_replicas * inner.num_replicas
    if num_replicas > MAX_REPLICAS:
        text = f"{inner.num_replicas} in each of {outer.num_replicas} are {num_replicas}"
        yield Violation(f"{path}.num_replicas", f"{text}; at most {MAX_REPLICAS}")


# ---- Strategies of subgraphs ----


def effective(strategy: Strategy, graph: GraphSpec) -> Strategy:
    """Return the job's strategy with those of subgraphs nested in it; raise if they do not fit."""
    *outer, current = [level for _, level in levels(strategy)]
    stages = list(_groups(graph, "model.graph")) if isinstance(current, ModelParallel) else []
    if not stages:
        return _within(strategy, strategy, graph, graph, "model.graph")
    group = _group_of_all(stages, graph)
    around = outer[-1] if outer else None
    if isinstance(around, DataParallel):
        if replace(around, options=replace(around.options, inner=None)) != group:
            text = f"{describe(group)} of {group.num_replicas} differs from the replicas around "
            text += f"the stages, {describe(around)} of {around.num_replicas}; say it once"
            raise InvalidInputError.at(f"{stages[0][0]}.training_strategy", text)
        return strategy  # said twice: in the graph and in the strategy
    replicated = replace(group, options=replace(group.options, inner=current))
    return replicated if around is None else _with_innermost(strategy, replicated)


def _groups(graph: GraphSpec, path: str) -> Iterator[tuple[str, SubgraphSpec, DataParallel]]:
    """Yield (path, subgraph, strategy) for each subgraph that is replicated by DataParallel."""
    for sub in graph.subgraphs:
        place, strategy = f"{path}.subgraphs.{sub.id}", sub.graph.training_strategy
        if isinstance(strategy, DataParallel):
            yield place, sub, strategy
        else:
            yield from _groups(sub.graph, place)


def _group_of_all(
    stages: list[tuple[str, SubgraphSpec, DataParallel]], graph: GraphSpec
) -> DataParallel:
    """Return the DataParallel strategy that all stages of a pipeline share; raise otherwise."""
    first, _, group = stages[0]
    inside = {id(node) for _, sub, _ in stages for node in _trained(sub.graph)}
    outside = [node.id for node in _trained(graph) if id(node) not in inside]
    if outside:
        text = f"stages hand their rows on, so all need {group.num_replicas} replicas, and "
        text += f"{', '.join(map(repr, outside))} is in none"
        raise InvalidInputError.at(f"{first}.training_strategy", text)
    for place, _, strategy in stages:
        if strategy.num_replicas != group.num_replicas:
            text = f"{strategy.num_replicas} where {first} has {group.num_replicas}: stages hand "
            text += "their rows on, so all need the same"
            raise InvalidInputError.at(f"{place}.training_strategy.num_replicas", text)
        if strategy != group:
            text = f"differs from that of {first}: stages that are replicated are replicated alike"
            raise InvalidInputError.at(f"{place}.training_strategy", text)
    if group.options.inner not in (None, Local()):
        text = f"{describe(group.options.inner)} inside a stage, which is a part of a model"
        raise InvalidInputError.at(f"{first}.training_strategy.options.inner", text)
    return replace(group, options=replace(group.options, inner=None))


def _with_innermost(strategy: Strategy, new: Strategy) -> Strategy:
    inner: Strategy | None = getattr(strategy.options, "inner", None)
    return new if inner is None else _around(strategy, _with_innermost(inner, new))


def _around(strategy: Any, inner: Strategy) -> Strategy:
    """Return a copy of the strategy with `inner` as its inner strategy."""
    around: Strategy = replace(strategy, options=replace(strategy.options, inner=inner))
    return around


def _within(
    whole: Strategy, current: Strategy, graph: GraphSpec, root: GraphSpec, path: str
) -> Strategy:
    """Return `whole` with the strategies of all subgraphs nested in it. current: that of
    `graph`."""
    for sub in graph.subgraphs:
        place = f"{path}.subgraphs.{sub.id}"
        wanted = sub.graph.training_strategy
        inner = current
        if wanted is not None and wanted != current:
            if isinstance(current, ModelParallel):
                text = f"{describe(wanted)} cannot be a stage, which is a part of the model around "
                text += "it; DataParallel can, whose replicas are of that part"
                raise InvalidInputError.at(f"{place}.training_strategy", text)
            _must_hold_all(sub, root, place, wanted, current)
            whole = _nested(whole, wanted, place)
            inner = wanted
        whole = _within(whole, inner, sub.graph, root, place)
    return whole


def _must_hold_all(
    sub: SubgraphSpec, root: GraphSpec, place: str, new: Strategy, outer: Strategy
) -> None:
    inside = {id(node) for node in _trained(sub.graph)}
    outside = [node.id for node in _trained(root) if id(node) not in inside]
    if outside:
        raise InvalidInputError.at(
            f"{place}.training_strategy",
            f"{describe(new)} differs from {describe(outer)} around it, and the subgraph does not "
            f"hold all that is trained: {', '.join(map(repr, outside))} is outside",
        )


def _trained(graph: GraphSpec) -> Iterator[NodeSpec]:
    yield from (node for node in graph.nodes if node.module not in WITHOUT_PARAMETERS)
    for sub in graph.subgraphs:
        yield from _trained(sub.graph)


def _nested(whole: Strategy, new: Strategy, place: str) -> Strategy:
    """Return `whole` with `new` nested at its innermost level; unchanged if it is there already."""
    if isinstance(whole, Local):
        return new
    options: Any = whole.options
    if not hasattr(options, "inner"):
        message = f"{describe(new)} cannot run inside {describe(whole)}, which holds no other one"
        raise InvalidInputError.at(f"{place}.training_strategy", message)
    if options.inner == new:
        return whole  # said twice: in the graph and in the strategy
    if isinstance(whole, DataParallel) and isinstance(new, DataParallel):
        message = (
            f"{describe(new)} inside {describe(whole)} is one flat strategy; give it as "
            "strategy.options.inner, or as the num_replicas of the strategy around"
        )
        raise InvalidInputError.at(f"{place}.training_strategy", message)
    return _around(whole, new if options.inner is None else _nested(options.inner, new, place))

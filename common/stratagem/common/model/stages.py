"""Assign nodes to stages: partitions of node ids, checked against the model's program.

Each node must be in exactly one partition. Stages are ordered by their dependencies, independently
of the order of declaration, so the graph of stages must be free of cycles: that is the meaning of
"contiguous" for a model with skips and branches. The loss belongs to the last stage; outputs that
are made elsewhere are sent to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.model.program import FromNode, ModelInput, ModelProgram, Source, leaves
from stratagem.common.schema.json import suggest


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage: nodes of the model that are computed together."""

    partition: int
    """The index of the declared partition that the stage was made from."""
    nodes: tuple[str, ...]
    """The nodes of the stage, in program order."""
    reads_input: bool
    """True if some node receives the input of the model."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The activations that one stage sends to another: node outputs, with all their uses there.
    Number l is the boundary between the stages l and l + 1; numbers from S − 1 on are boundaries
    that skip stages, ordered by (source, target)."""

    number: int
    source: int
    target: int
    uses: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class StagePlan:
    """The stages in the order in which a micro-batch passes them, and the non-empty boundaries."""

    program: ModelProgram
    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    num_boundaries: int
    """The number of boundaries, counting empty ones between neighbouring stages."""

    @cached_property
    def stage_of(self) -> Mapping[str, int]:
        return {node: i for i, stage in enumerate(self.stages) for node in stage.nodes}

    def before(self, stage: int) -> tuple[Boundary, ...]:
        """Return the boundaries over which a stage receives activations."""
        return tuple(boundary for boundary in self.boundaries if boundary.target == stage)

    def after(self, stage: int) -> tuple[Boundary, ...]:
        """Return the boundaries over which a stage sends activations."""
        return tuple(boundary for boundary in self.boundaries if boundary.source == stage)

    def dependencies(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each stage, the list of stages from which it receives activations."""
        count = range(len(self.stages))
        return tuple(tuple(sorted({b.source for b in self.before(i)})) for i in count)


def plan_stages(program: ModelProgram, partitions: Sequence[Sequence[str]]) -> StagePlan:
    """Assign nodes to stages, and find the boundaries. partitions: node ids, or ids and paths of
    subgraphs, which stand for all nodes inside them.

    Raises InvalidInputError, which names every id that is unknown, claimed twice or unclaimed, or
    the partitions that need each other in a cycle.
    """
    owner = _owners(program, partitions)
    needs = _needs(program, owner, len(partitions))
    order = _ordered(needs, owner, program)
    stage_of = {partition: stage for stage, partition in enumerate(order)}
    stages = tuple(_stage(program, owner, partition) for partition in order)
    placed = {node: stage_of[partition] for node, partition in owner.items()}
    boundaries, num_boundaries = _boundaries(program, placed, len(stages))
    return StagePlan(program, stages, boundaries, num_boundaries)


def _owners(program: ModelProgram, partitions: Sequence[Sequence[str]]) -> dict[str, int]:
    """Map each node to the index of its partition. Raises InvalidInputError unless it has one."""
    if not partitions:
        raise InvalidInputError.at("partitions", "must not be empty")
    names = [call.node for call in program.calls]
    owner: dict[str, int] = {}
    violations: list[Violation] = []
    for i, partition in enumerate(partitions):
        if not partition:
            violations.append(Violation(f"partitions[{i}].node_ids", "must not be empty"))
        for j, node_id in enumerate(partition):
            field = f"partitions[{i}].node_ids[{j}]"
            claimed = [name for name in names if name == node_id or name.startswith(f"{node_id}/")]
            if not claimed:
                violations.append(
                    Violation(
                        field, f"{node_id!r} is no node of the model; {_suggestion(names, node_id)}"
                    )
                )
            for name in claimed:
                if name in owner:
                    text = f"node {name!r} is claimed already by partitions[{owner[name]}]"
                    violations.append(Violation(field, text))
                owner.setdefault(name, i)
    if missing := [name for name in names if name not in owner]:
        text = f"{', '.join(map(repr, missing))}: claimed by no partition; every node must be"
        violations.append(Violation("partitions", text))
    if violations:
        raise InvalidInputError(violations=violations)
    return owner


def _suggestion(names: Sequence[str], wrong: str) -> str:
    tops = list(dict.fromkeys(name.partition("/")[0] for name in names))
    return f"known are: {', '.join(tops)}{suggest(wrong, tops)}"


def _needs(program: ModelProgram, owner: Mapping[str, int], count: int) -> list[set[int]]:
    """Return, for each partition, the set of other partitions whose outputs it uses."""
    needs: list[set[int]] = [set() for _ in range(count)]
    for call in program.calls:
        for arg in call.args:
            for leaf in leaves(arg):
                if isinstance(leaf, FromNode) and owner[leaf.node] != owner[call.node]:
                    needs[owner[call.node]].add(owner[leaf.node])
    return needs


def _ordered(
    needs: Sequence[set[int]], owner: Mapping[str, int], program: ModelProgram
) -> list[int]:
    """Sort the partitions so that each uses outputs of earlier ones only; ties in program order."""
    first: dict[int, int] = {}
    for position, call in enumerate(program.calls):
        first.setdefault(owner[call.node], position)
    waiting = set(range(len(needs)))
    order: list[int] = []
    while waiting:
        ready = [node for node in waiting if not needs[node] & waiting]
        if not ready:
            raise InvalidInputError.at("partitions", _ring(needs, waiting))
        order.append(min(ready, key=first.__getitem__))
        waiting.remove(order[-1])
    return order


def _ring(needs: Sequence[set[int]], waiting: set[int]) -> str:
    path = [min(waiting)]
    while (source := min(needs[path[-1]] & waiting)) not in path:
        path.append(source)
    names = [f"partitions[{i}]" for i in [*path[path.index(source) :], source]]
    return (
        f"interleaved: {' needs '.join(names)}; a partition must be contiguous, "
        "so that no other one is between its nodes"
    )


def _stage(program: ModelProgram, owner: Mapping[str, int], partition: int) -> Stage:
    calls = [call for call in program.calls if owner[call.node] == partition]
    reads_input = any(
        isinstance(leaf, ModelInput) for call in calls for arg in call.args for leaf in leaves(arg)
    )
    return Stage(partition, tuple(call.node for call in calls), reads_input)


def _boundaries(
    program: ModelProgram, placed: Mapping[str, int], num_stages: int
) -> tuple[tuple[Boundary, ...], int]:
    uses: dict[tuple[int, int], dict[str, list[int]]] = {}
    readers: list[tuple[int, Source]] = [
        (placed[call.node], arg) for call in program.calls for arg in call.args
    ]
    for target, source in [*readers, (num_stages - 1, program.output)]:
        for leaf in leaves(source):
            if isinstance(leaf, FromNode) and placed[leaf.node] != target:
                by_node = uses.setdefault((placed[leaf.node], target), {})
                by_node.setdefault(leaf.node, []).append(leaf.use)
    skips = sorted(pair for pair in uses if pair[1] != pair[0] + 1)
    number = {pair: num_stages - 1 + i for i, pair in enumerate(skips)}
    boundaries = tuple(
        Boundary(
            number.get(pair, pair[0]),
            *pair,
            {node: tuple(consumers) for node, consumers in by_node.items()},
        )
        for pair, by_node in sorted(uses.items())
    )
    return boundaries, num_stages - 1 + len(skips)

"""Plays a schedule without computing: proves that it ends, and says how good it is.

A set of action lists is free of deadlock if, with sends that never block, each rank can always
come to the end of its list. That is decided here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.pipeline.schedules import Action, Schedule, TaskKind

EQUAL_COSTS: Final[Mapping[TaskKind, float]] = {
    TaskKind.FORWARD: 1.0, TaskKind.BACKWARD: 1.0, TaskKind.INPUT: 1.0, TaskKind.WEIGHT: 1.0
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timeline:
    """The duration of a schedule and the busy time of its ranks, in the units of the costs."""

    makespan: float
    busy: tuple[float, ...]
    """Per rank."""

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time; 0 is perfect."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0


def check(
    schedule: Schedule,
    rank_of: Sequence[int],
    num_micro_batches: int,
    needs: Sequence[Sequence[int]] | None = None,
    *,
    backward: bool = True,
) -> Timeline:
    """Proves that a schedule does everything once, on the right rank, in rising order, and ends.

    rank_of: the rank of each stage. needs: for each stage those whose activations it needs; by
    default the one before it. Raises InvalidInputError that shows the schedule as a grid.
    """
    _check_complete(schedule, rank_of, num_micro_batches, backward)
    return simulate(schedule, _chain(len(rank_of)) if needs is None else needs)


def simulate(
    schedule: Schedule,
    needs: Sequence[Sequence[int]],
    costs: Mapping[TaskKind, float] = EQUAL_COSTS,
    hop: float = 0.0,
) -> Timeline:
    """Compute the timeline of a schedule in which actions take `costs` and a transfer takes
    `hop`."""
    needed_by = [[t for t, sources in enumerate(needs) if s in sources] for s in range(len(needs))]
    spans: dict[Action, tuple[float, float]] = {}
    positions, clocks, busy = [0] * len(schedule), [0.0] * len(schedule), [0.0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                start = _ready_at(action, spans, needs, needed_by, hop)
                if start is None:
                    break
                start = max(start, clocks[rank])
                clocks[rank] = start + costs[action.kind]
                busy[rank] += costs[action.kind]
                spans[action] = (start, clocks[rank])
                positions[rank] += 1
                progress = True
    stuck = [rank for rank, actions in enumerate(schedule) if positions[rank] < len(actions)]
    if stuck:
        at = {rank: positions[rank] for rank in stuck}
        rank_of = {a.stage: rank for rank, actions in enumerate(schedule) for a in actions}
        waits = []
        for rank in stuck:
            action = schedule[rank][at[rank]]
            awaited = _awaited(action, spans, needs, needed_by, rank_of)
            waits.append(f"rank {rank} at {action} waits for {awaited}")
        text = f"deadlock: {'; '.join(waits)}\n{format_lists(schedule, at)}"
        raise InvalidInputError.at("schedule", text)
    return Timeline(max(clocks), tuple(busy))


def peak_live(schedule: Schedule) -> dict[int, int]:
    """Return, by stage, the most micro-batches whose activations are kept at one time."""
    live: dict[int, int] = {}
    peak: dict[int, int] = {}
    for actions in schedule:
        for action in actions:
            change = {TaskKind.FORWARD: 1, TaskKind.INPUT: 0}.get(action.kind, -1)
            live[action.stage] = live.get(action.stage, 0) + change
            peak[action.stage] = max(peak.get(action.stage, 0), live[action.stage])
    return peak


def format_lists(schedule: Schedule, marks: Mapping[int, int] | None = None) -> str:
    """Ranks downwards, their actions in order; the marked one of a rank stands in brackets."""
    marks = marks or {}
    rows = [
        (
            f"rank {rank}",
            [f"[{a}]" if marks.get(rank) == i else str(a) for i, a in enumerate(actions)],
        )
        for rank, actions in enumerate(schedule)
    ]
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, list[str]]]) -> str:
    width = max((len(cell) for _, cells in rows for cell in cells), default=1)
    return "\n".join(
        f"{name}: {' '.join(cell.ljust(width) for cell in cells)}".rstrip() for name, cells in rows
    )


def _chain(num_stages: int) -> list[tuple[int, ...]]:
    return [(stage - 1,) if stage else () for stage in range(num_stages)]


def _ready_at(
    action: Action,
    spans: Mapping[Action, tuple[float, float]],
    needs: Sequence[Sequence[int]],
    needed_by: Sequence[Sequence[int]],
    hop: float,
) -> float | None:
    """Return the time at which all that an action needs is available; None while it is not
    known."""
    stage, micro_batch = action.stage, action.micro_batch
    found: list[float] = []
    if action.kind is TaskKind.FORWARD:
        remote = [(TaskKind.FORWARD, source) for source in needs[stage]]
    elif action.kind is TaskKind.WEIGHT:
        remote = []
    else:
        remote = [(TaskKind.BACKWARD, target) for target in needed_by[stage]]
    for kind, other in remote:
        options = (kind, TaskKind.INPUT) if kind is TaskKind.BACKWARD else (kind,)
        ends = [spans[a][1] for k in options if (a := Action(k, other, micro_batch)) in spans]
        if not ends:
            return None
        found.append(ends[0] + hop)
    if action.kind is not TaskKind.FORWARD:
        own = TaskKind.INPUT if action.kind is TaskKind.WEIGHT else TaskKind.FORWARD
        before = Action(own, stage, micro_batch)
        if before not in spans:
            return None
        found.append(spans[before][1])
    return max(found, default=0.0)


def _awaited(
    action: Action,
    spans: Mapping[Action, tuple[float, float]],
    needs: Sequence[Sequence[int]],
    needed_by: Sequence[Sequence[int]],
    rank_of: Mapping[int, int],
) -> str:
    """Describe in words what an action that cannot begin needs and no rank has done."""
    stage, micro_batch = action.stage, action.micro_batch
    wanted: list[tuple[tuple[TaskKind, ...], int]] = []
    if action.kind is TaskKind.FORWARD:
        wanted += [((TaskKind.FORWARD,), source) for source in needs[stage]]
    elif action.kind is not TaskKind.WEIGHT:
        wanted += [((TaskKind.BACKWARD, TaskKind.INPUT), target) for target in needed_by[stage]]
    if action.kind is not TaskKind.FORWARD:
        wanted.append(
            ((TaskKind.INPUT if action.kind is TaskKind.WEIGHT else TaskKind.FORWARD,), stage)
        )
    words = []
    for kinds, other in wanted:
        if not any(Action(kind, other, micro_batch) in spans for kind in kinds):
            who = f"rank {rank_of[other]}" if other in rank_of else "no rank"
            words.append(f"{Action(kinds[0], other, micro_batch)} of {who}")
    return " and ".join(words)


def _check_complete(
    schedule: Schedule, rank_of: Sequence[int], num_micro_batches: int, backward: bool
) -> None:
    for rank, actions in enumerate(schedule):
        done: dict[tuple[int, TaskKind], int] = {}
        for index, action in enumerate(actions):
            key = (action.stage, action.kind)
            wrong = ""
            if not 0 <= action.stage < len(rank_of) or rank_of[action.stage] != rank:
                wrong = f"stage {action.stage} does not belong to rank {rank}"
            elif action.micro_batch != done.get(key, 0):
                wrong = f"micro-batch {done.get(key, 0)} must be next"
            elif action.micro_batch >= num_micro_batches:
                wrong = f"there are {num_micro_batches} micro-batches"
            if wrong:
                grid = format_lists(schedule, {rank: index})
                raise InvalidInputError.at("schedule", f"{action} on rank {rank}: {wrong}\n{grid}")
            done[key] = action.micro_batch + 1
        for stage in [s for s, owner in enumerate(rank_of) if owner == rank]:
            counts = {kind: done.get((stage, kind), 0) for kind in TaskKind}
            whole = counts[TaskKind.BACKWARD] or counts[TaskKind.INPUT]
            halves = counts[TaskKind.INPUT] == counts[TaskKind.WEIGHT]
            both = bool(counts[TaskKind.BACKWARD] and counts[TaskKind.INPUT])
            expected = num_micro_batches if backward else 0
            if (
                counts[TaskKind.FORWARD] != num_micro_batches
                or whole != expected
                or both
                or not halves
            ):
                grid = format_lists(schedule)
                text = f"stage {stage} is not complete for {num_micro_batches} micro-batches"
                raise InvalidInputError.at("schedule", f"{text}\n{grid}")

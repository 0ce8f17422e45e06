"""Simulate a schedule without computing, to prove that it ends, and count the activations that it
keeps.

A set of action lists is free of deadlock if, with sends that never block, each rank can always come
to the end of its list. The check is made before anything runs.
"""

from collections.abc import Mapping, Sequence

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.pipeline.schedules import Action, Schedule, TaskKind


def check(
    schedule: Schedule,
    rank_of: Sequence[int],
    num_micro_batches: int,
    needs: Sequence[Sequence[int]] | None = None,
    *,
    backward: bool = True,
) -> None:
    """Check that a schedule does all work once, on the right rank, in ascending order, and ends.

    rank_of: the rank of each stage. needs: for each stage the stages whose activations it needs; by
    default the previous stage. Raises InvalidInputError, which shows the schedule as a grid.
    """
    _check_complete(schedule, rank_of, num_micro_batches, backward)
    if needs is None:
        needs = [(stage - 1,) if stage else () for stage in range(len(rank_of))]
    needed_by = consumers(needs)
    done: set[Action] = set()
    positions = [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule):
            for action in actions[positions[rank] :]:
                if any(done.isdisjoint(group) for group in required(action, needs, needed_by)):
                    break
                done.add(action)
                positions[rank] += 1
                progress = True
    at = {rank: place for rank, place in enumerate(positions) if place < len(schedule[rank])}
    if at:
        waits = []
        for rank, place in at.items():
            groups = required(schedule[rank][place], needs, needed_by)
            missing = [group[0] for group in groups if done.isdisjoint(group)]
            awaited = " and ".join(f"{op} of {_owner(schedule, op)}" for op in missing)
            waits.append(f"rank {rank} at {schedule[rank][place]} waits for {awaited}")
        text = f"deadlock: {'; '.join(waits)}\n{format_lists(schedule, at)}"
        raise InvalidInputError.at("schedule", text)


def consumers(needs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each stage, the stages that need its activations: the inverse of `needs`."""
    return [[t for t, sources in enumerate(needs) if s in sources] for s in range(len(needs))]


def required(
    action: Action, needs: Sequence[Sequence[int]], needed_by: Sequence[Sequence[int]]
) -> list[tuple[Action, ...]]:
    """Return groups of prerequisites of an action; at least one action of each group must be done
    before it."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is TaskKind.FORWARD:
        return [(Action(TaskKind.FORWARD, source, micro_batch),) for source in needs[stage]]
    if action.kind is TaskKind.WEIGHT:
        return [(Action(TaskKind.INPUT, stage, micro_batch),)]
    halves = (TaskKind.BACKWARD, TaskKind.INPUT)
    gradients = [
        tuple(Action(kind, target, micro_batch) for kind in halves) for target in needed_by[stage]
    ]
    return [*gradients, (Action(TaskKind.FORWARD, stage, micro_batch),)]


def peak_live(schedule: Schedule) -> dict[int, int]:
    """Return the most micro-batches with activations kept at one time, keyed by stage."""
    live: dict[int, int] = {}
    peak: dict[int, int] = {}
    for actions in schedule:
        for action in actions:
            change = {TaskKind.FORWARD: 1, TaskKind.INPUT: 0}.get(action.kind, -1)
            live[action.stage] = live.get(action.stage, 0) + change
            peak[action.stage] = max(peak.get(action.stage, 0), live[action.stage])
    return peak


def format_lists(schedule: Schedule, marks: Mapping[int, int] | None = None) -> str:
    """Format a schedule as one line of actions per rank, with marked actions in brackets."""
    marks = marks or {}
    rows = [
        (
            f"rank {rank}",
            [f"[{a}]" if marks.get(rank) == i else str(a) for i, a in enumerate(actions)],
        )
        for rank, actions in enumerate(schedule)
    ]
    width = max((len(cell) for _, cells in rows for cell in cells), default=1)
    return "\n".join(
        f"{name}: {' '.join(cell.ljust(width) for cell in cells)}".rstrip() for name, cells in rows
    )


def _owner(schedule: Schedule, action: Action) -> str:
    """Return the rank that computes the stage of an action, as text for an error message."""
    ranks = (r for r, actions in enumerate(schedule) for a in actions if a.stage == action.stage)
    rank = next(ranks, None)
    return "no rank" if rank is None else f"rank {rank}"


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

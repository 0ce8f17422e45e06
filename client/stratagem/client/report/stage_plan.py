"""The work of a pipeline on the micro-batches of a step, as it was measured or as it is planned."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stratagem.client.history.measured_actions import MeasuredStep
from stratagem.client.pictures.stages import Task
from stratagem.common.pipeline.schedules import SCHEDULES, Action, Schedule, TaskKind, choose
from stratagem.common.pipeline.simulation import consumers, required

MAX_TASKS: Final = 4096
_TAKES: Final = {
    TaskKind.FORWARD: 1.0,
    TaskKind.BACKWARD: 2.0,
    TaskKind.INPUT: 1.0,
    TaskKind.WEIGHT: 1.0,
}
"""A backward pass computes two gradients."""


def measured_tasks(measured: MeasuredStep) -> tuple[list[str], list[Task]]:
    """Return the lanes of a step that was measured, named by their stages, and what was done in
    each when, waiting included; in seconds."""
    places = {stage: lane for lane, its in enumerate(measured.lanes.values()) for stage in its}
    tasks: list[Task] = []
    for stage, actions in measured.actions.items():
        for each in actions:
            begin, lane = each.begin_s, places[stage]
            tasks.append(Task(lane, begin, each.end_s, each.kind, each.micro_batch))
            if each.wait_s > 0.0:
                since = max(begin - each.wait_s, 0.0)
                tasks.append(Task(lane, since, begin, "wait", each.micro_batch))
    return [_name(its) for its in measured.lanes.values()], tasks


def planned_tasks(
    ranks: Sequence[int],
    engine: str,
    strategy: Mapping[str, Any],
    num_rows: int,
    busy_s: Sequence[float] = (),
) -> tuple[list[str], list[Task]]:
    """Return the lanes of one replica, named by their stages, and what is done in each when;
    nothing where that is not known.

    ranks: of each stage in the newest membership. engine: the newest one, which names the schedule.
    strategy: of one replica. num_rows: of its part of a batch. busy_s: how long each stage has
    computed in a step; times are then in seconds, and otherwise in forward passes of stages that
    are equal. A backward pass takes twice as long as a forward one, hops take no time.
    """
    size = (strategy.get("communication") or {}).get("micro_batch_size")
    if not ranks or not size or not num_rows:
        return [], []
    count = math.ceil(num_rows / size)
    if count * len(ranks) * 2 > MAX_TASKS:
        return [], []
    named = next((word for word in engine.split() if word in SCHEDULES), "1f1b")
    return [_lane(ranks, rank) for rank in range(max(ranks) + 1)], _played(
        choose(named, ranks, count),
        [each / (3 * count) for each in busy_s]
        if len(busy_s) == len(ranks)
        else [1.0] * len(ranks),
    )


def _lane(ranks: Sequence[int], rank: int) -> str:
    """Return what a rank has: "stage 1", or "stages 0, 2" where it takes turns at several."""
    return _name([stage for stage, its_rank in enumerate(ranks) if its_rank == rank])


def _name(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _played(schedule: Schedule, lengths: Sequence[float]) -> list[Task]:
    """Return when each action begins and ends, each as early as it can. lengths: of a forward pass,
    by stage."""
    needs = [(stage - 1,) if stage else () for stage in range(len(lengths))]
    needed_by = consumers(needs)
    done: dict[Action, float] = {}
    tasks: list[Task] = []
    free, places = [0.0] * len(schedule), [0] * len(schedule)
    while any(places[rank] < len(actions) for rank, actions in enumerate(schedule)):
        before = len(tasks)
        for rank, actions in enumerate(schedule):
            for action in actions[places[rank] :]:
                wanted = required(action, needs, needed_by)
                if not all(any(each in done for each in group) for group in wanted):
                    break
                ready = [done[each] for group in wanted for each in group if each in done]
                start = max([free[rank], *ready])
                free[rank] = done[action] = start + _TAKES[action.kind] * lengths[action.stage]
                kind = action.kind.name.lower()
                tasks.append(Task(rank, start, free[rank], kind, action.micro_batch))
                places[rank] += 1
        if len(tasks) == before:  # no schedule of ours waits for ever
            return []
    return tasks

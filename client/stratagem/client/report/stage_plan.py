"""The order in which a pipeline works on the micro-batches of a step, as it is planned."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stratagem.client.pictures.stages import Task
from stratagem.common.pipeline.schedule_simulation import consumers, required
from stratagem.common.pipeline.schedules import SCHEDULES, Action, Schedule, TaskKind, choose

MAX_TASKS: Final = 4096
_TAKES: Final = {
    TaskKind.FORWARD: 1.0,
    TaskKind.BACKWARD: 2.0,
    TaskKind.INPUT: 1.0,
    TaskKind.WEIGHT: 1.0,
}
"""A backward pass computes two gradients."""


def planned_tasks(
    ranks: Sequence[int], engine: str, job: Mapping[str, Any]
) -> tuple[list[str], list[Task]]:
    """Return the ranks of one replica, and what they do when; nothing where that is not known.

    ranks: of each stage in the newest membership. engine: the newest one, which names the schedule.
    Times are in forward passes of one stage; hops take none, and all stages are equal.
    """
    sizes = (job.get("strategy") or {}).get("communication") or {}
    size, batch = sizes.get("micro_batch_size"), job.get("batch_size")
    if not ranks or not size or not batch:
        return [], []
    num_replicas = (job.get("strategy") or {}).get("num_replicas") or 1
    count = max(math.ceil(batch / num_replicas / size), 1)
    if count * len(ranks) * 2 > MAX_TASKS:
        return [], []
    named = next((word for word in engine.split() if word in SCHEDULES), "1f1b")
    return [f"rank {rank}" for rank in range(max(ranks) + 1)], _played(
        choose(named, ranks, count), len(ranks)
    )


def _played(schedule: Schedule, num_stages: int) -> list[Task]:
    """Return when each action begins and ends, each as early as it can."""
    needs = [(stage - 1,) if stage else () for stage in range(num_stages)]
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
                free[rank] = done[action] = start + _TAKES[action.kind]
                kind = action.kind.name.lower()
                tasks.append(Task(rank, start, free[rank], kind, action.micro_batch))
                places[rank] += 1
        if len(tasks) == before:  # no schedule of ours waits for ever
            return []
    return tasks

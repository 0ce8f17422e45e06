"""When the stages of a pipeline did what in one step, as they have measured it, on one axis.

Each worker tells times since it has begun the step, by its own clock, and when that was. Workers of
one machine have one clock. Of those of several machines, what one has sent cannot be
there before it was sent, which bounds how far apart two clocks are from both sides: by activations
on their way there, by gradients on their way back. Half-way between the bounds the error is at most
half of what lies between them, as in the Network Time Protocol (RFC 5905, section 8).
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

from stratagem.client.course.shapes import SeriesLike
from stratagem.common.history.recording import (
    NONE,
    PREFIX,
    StageAction,
    StageReport,
    party_of_stage,
)

_GRADIENTS: Final = ("backward", "input")
"""Kinds of work that make, and need, the gradient of an activation."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The work of one step, in seconds since the first of it has begun."""

    step: int
    lanes: Mapping[int, tuple[int, ...]]
    """By rank of a worker, the stages that it has."""
    actions: Mapping[int, Sequence[StageAction]]
    """By stage, in order of time."""
    error_s: float
    """By which the clocks of two workers may be further apart, or closer, than drawn."""

    @property
    def is_whole(self) -> bool:
        """Return whether all micro-batches are told, not only every so many of them."""
        numbers = {each.micro_batch for its in self.actions.values() for each in its} - {NONE}
        return numbers == set(range(max(numbers, default=-1) + 1))


def measured_step(history: Mapping[str, SeriesLike], num_stages: int) -> MeasuredStep | None:
    """Return the newest step whose work was measured by all stages; None where none was."""
    found = [_values(history, stage) for stage in range(num_stages)]
    step = max((step for step, _ in found), default=0)
    if not step or any(each != step for each, _ in found):
        return None
    reports = [StageReport.of(values) for _, values in found]
    if not all(report.actions for report in reports):
        return None
    lanes: dict[int, tuple[int, ...]] = {}
    for stage, report in enumerate(reports):
        lanes[report.rank] = (*lanes.get(report.rank, ()), stage)
    offsets, error_s = _offsets(reports)
    first = min(its.actions[0].begin_s + offsets[its.rank] for its in reports)
    actions = {
        stage: _moved(report.actions, offsets[report.rank] - first)
        for stage, report in enumerate(reports)
    }
    return MeasuredStep(step, dict(sorted(lanes.items())), actions, error_s)


def _values(history: Mapping[str, SeriesLike], stage: int) -> tuple[int, dict[str, float]]:
    """Return the newest step that a stage has told, and its values by series."""
    begin = f"{party_of_stage(stage)}:"
    its = {
        name.removeprefix(begin): series
        for name, series in history.items()
        if name.startswith(f"{begin}{PREFIX}") and len(series.step)
    }
    step = max((int(series.step[-1]) for series in its.values()), default=0)
    newest = {name: float(one.last[-1]) for name, one in its.items() if int(one.step[-1]) == step}
    return step, {name: value for name, value in newest.items() if math.isfinite(value)}


def _moved(actions: Sequence[StageAction], by_s: float) -> list[StageAction]:
    return [replace(a, begin_s=a.begin_s + by_s, end_s=a.end_s + by_s) for a in actions]


def _offsets(reports: Sequence[StageReport]) -> tuple[dict[int, float], float]:
    """Return by rank when its worker has begun the step, in seconds since the first rank has, and
    by how much the least certain of them may be wrong."""
    between = _bounds(reports)
    ranks = sorted({report.rank for report in reports})
    offsets, errors = {ranks[0]: 0.0}, {ranks[0]: 0.0}
    near = [
        (high - low, ranks[0], rank) for (a, rank), (low, high) in between.items() if a == ranks[0]
    ]
    heapq.heapify(near)
    while near:  # the closest bounds first, so that every clock is as certain as it can be
        width, known, rank = heapq.heappop(near)
        if rank in offsets:
            continue
        low, high = between[known, rank]
        offsets[rank] = offsets[known] + _middle(low, high)
        errors[rank] = errors[known] + (0.0 if math.isinf(width) else max(width, 0.0) / 2)
        for (a, b), bounds in between.items():
            if a == rank and b not in offsets:
                heapq.heappush(near, (bounds[1] - bounds[0], rank, b))
    return {rank: offsets.get(rank, 0.0) for rank in ranks}, max(errors.values())


def _middle(low: float, high: float) -> float:
    """Return the number half-way between two bounds, of which one may be missing."""
    finite = [each for each in (low, high) if math.isfinite(each)]
    return sum(finite) / max(len(finite), 1)


def _bounds(reports: Sequence[StageReport]) -> dict[tuple[int, int], tuple[float, float]]:
    """Return, for each two ranks that send to each other or share a clock, between what numbers of
    seconds lies the begin of the step at the second one behind that at the first one."""
    low: defaultdict[tuple[int, int], float] = defaultdict(lambda: -math.inf)
    for report in reports:
        for source in report.sources:
            if source < len(reports) and reports[source].rank != report.rank:
                there, back = reports[source], report
                pair = there.rank, back.rank
                low[pair] = max(low[pair], _least(there, back, ("forward",)))
                low[pair[::-1]] = max(low[pair[::-1]], _least(back, there, _GRADIENTS))
    for one, other in combinations(reports, 2):
        if one.clock and one.clock == other.clock:
            pair, apart_s = (one.rank, other.rank), other.began_s - one.began_s
            low[pair], low[pair[::-1]] = apart_s, -apart_s
    pairs = {pair for each in low for pair in (each, each[::-1])}
    return {(a, b): (low[a, b], -low[b, a]) for a, b in pairs}


def _least(sender: StageReport, receiver: StageReport, kinds: Sequence[str]) -> float:
    """Return the least number of seconds by which the receiver has begun the step behind the
    sender: no micro-batch is worked on before it is there."""
    ends = {each.micro_batch: each.end_s for each in sender.actions if each.kind in kinds}
    return max(
        (
            ends[each.micro_batch] - each.begin_s
            for each in receiver.actions
            if each.kind in kinds and each.micro_batch in ends
        ),
        default=-math.inf,
    )

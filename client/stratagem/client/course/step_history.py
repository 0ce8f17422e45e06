"""Hold the step history of a run as numpy columns, by series."""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from stratagem.client.pictures.axes import short, size_text
from stratagem.client.pictures.svg import NumberTable
from stratagem.common.history import Columns, joined
from stratagem.common.history.columns import part_of
from stratagem.common.history.recording import (
    NONE,
    PREFIX,
    StageAction,
    StageReport,
    is_of_newest_segment,
    party_of_stage,
    unpack_columns,
)
from stratagem.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    import pandas

# ---- Series ----

MAX_BLOCK_ROWS: Final = 65_536
MAX_NAMED: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class StepSeries:
    """One series of the step history as columns, a row for one or several steps.

    A row stands for the steps k * stride + 1 to (k + 1) * stride: `step` is the last of them that
    exists; `last`, `min` and `max` are those of the finite values, NaN if there are none; `count`
    and `nonfinite` are the numbers of finite and other values.
    """

    name: str
    party: str
    """The party whose steps are recorded; "" is the whole run."""
    stride: int
    observed: bool
    """The values depend on clocks and machines, so two runs of one job differ in them."""
    columns: Columns
    provisional: NDArray[np.bool_]
    """A flag per row: it has steps of an unfinished segment, which may be trained again."""

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def step(self) -> NDArray[np.int64]:
        return self.columns.step

    @property
    def last(self) -> NDArray[np.float64]:
        return self.columns.last

    @property
    def min(self) -> NDArray[np.float64]:
        return self.columns.min

    @property
    def max(self) -> NDArray[np.float64]:
        return self.columns.max

    @property
    def count(self) -> NDArray[np.int64]:
        return self.columns.count

    @property
    def nonfinite(self) -> NDArray[np.int64]:
        return self.columns.nonfinite


class History(Mapping[str, StepSeries]):
    """The step history: series keyed by name, or by `party:name` for a party below the root."""

    def __init__(self, series: Iterable[StepSeries]) -> None:
        self._series = {
            f"{item.party}:{item.name}" if item.party else item.name: item for item in series
        }

    @classmethod
    def of(cls, blocks: Iterable[pb.HistoryBlock]) -> "History":
        """Decode the step history in a coordinator's answer."""
        by_series: dict[tuple[str, str], list[pb.HistoryBlock]] = {}
        for block in blocks:
            by_series.setdefault((block.party, block.series), []).append(block)
        return cls(map(_series, by_series.values()))

    @property
    def next_step(self) -> int:
        """Return the first step to request next: that of the first row that may still change."""
        last_of: dict[str, int] = {}
        for series in self._series.values():  # a segment ends for all series of its party
            certain = series.step[~series.provisional]
            last = int(certain[-1]) if len(certain) else 0
            last_of[series.party] = max(last, last_of.get(series.party, 0))
        last = min(last_of.values(), default=0)
        stride = max((item.stride for item in self._series.values()), default=1)
        return (last - 1) // stride * stride + 1 if last else 1

    def continued(self, later: "History") -> "History":
        """Return this history with its rows from `next_step` on replaced by a later answer's."""
        from_step = self.next_step
        names = dict.fromkeys([*self, *later])
        pairs = ((self._series.get(name), later._series.get(name)) for name in names)
        return History(_continued(earlier, other, from_step) for earlier, other in pairs)

    def with_newest_of(self, whole: "History") -> "History":
        """Return this history of some steps, with the series that the coordinator keeps only for
        the newest segment taken from `whole`."""
        older = [item for item in self._series.values() if not is_of_newest_segment(item.party)]
        newest = [item for item in whole._series.values() if is_of_newest_segment(item.party)]
        return History([*older, *newest])

    def __getitem__(self, name: str) -> StepSeries:
        try:
            return self._series[name]
        except KeyError:
            names = ", ".join(self._series) or "none"
            text = f"there is no series {name!r} in this history, which has: {names}"
            if name.partition(".")[0] not in ("train", "time", "worker"):
                text += (
                    "; evaluations are no steps: run.metrics() has the newest one, the metrics of"
                    " run.status().commits those of the states that are kept"
                )
            raise KeyError(text) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def __repr__(self) -> str:
        """Return a summary: the number of steps, and the names of the series."""
        steps = max((int(item.step[-1]) for item in self._series.values() if len(item)), default=0)
        names = list(self._series)
        named = ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")
        return f"History({len(names)} series up to step {steps}{named and f': {named}'})"

    def _repr_html_(self) -> str:
        """Return an HTML table of the series with their last values and ranges."""
        headings = ("series", "party", "rows", "up to step", "last", "least", "greatest", "")
        return NumberTable(headings, tuple(map(_row, self._series.values()))).to_html()

    def bubble(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return (steps, idle shares of the pipeline's workers) with an element per row, measured
        in the row's last step; empty arrays without `stage/<i>` series."""
        busy, spans = (
            [series for series in self._series.values() if _is_of_stage(series, name)]
            for name in ("busy_s", "span_s")
        )
        if not busy or len({series.step.tobytes() for series in (*busy, *spans)}) > 1:
            return np.empty(0, np.int64), np.empty(0)
        makespan_s = np.max([series.last for series in spans], axis=0)
        busy_s = np.sum([series.last for series in busy], axis=0)
        return busy[0].step, 1.0 - busy_s / (len(spans) * np.maximum(makespan_s, 1e-12))

    def to_pandas(self) -> "pandas.DataFrame":
        """Return all rows as one long-form DataFrame; needs pandas."""
        import pandas as pd

        tables = [pd.DataFrame(_table(series)) for series in self._series.values()]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _row(series: StepSeries) -> tuple[str, ...]:
    end = str(series.step[-1]) if len(series) else ""
    last, low, high = (col[np.isfinite(col)] for col in (series.last, series.min, series.max))
    values = (last[-1], low.min(), high.max()) if min(map(len, (last, low, high))) else ()
    texts = [_value_text(series.name, float(value)) for value in values] or ["", "", ""]
    how = "observed" if series.observed else ""
    return (series.name, series.party, str(len(series)), end, *texts, how)


def _value_text(name: str, value: float) -> str:
    """Format a value for people: times as durations, memory with its unit."""
    if name == "time.wall_s":
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return size_text(value) if name.endswith("memory_bytes") else short(value)


def _is_of_stage(series: StepSeries, name: str) -> bool:
    return series.name == name and series.party.rpartition("/")[0].endswith("stage")


def _series(blocks: list[pb.HistoryBlock]) -> StepSeries:
    stride = max(block.stride for block in blocks)
    ended, in_flight = (
        [
            unpack_columns(block.columns, MAX_BLOCK_ROWS)
            for block in blocks
            if block.provisional == provisional
        ]
        for provisional in (False, True)
    )
    columns = joined([*ended, *in_flight], stride)
    num_certain = max((int(part.step[-1]) for part in ended if len(part)), default=0)
    first = blocks[0]
    return StepSeries(
        *(first.series, first.party, stride, first.observed, columns),
        provisional=columns.step > num_certain,
    )


def _continued(earlier: StepSeries | None, later: StepSeries | None, from_step: int) -> StepSeries:
    """Return a series whose rows from from_step on are replaced by those of `later`."""
    series = cast(StepSeries, earlier or later)
    stride = max(part.stride for part in (earlier, later) if part is not None)
    first = (from_step - 1) // stride * stride
    head = joined([], stride)
    if earlier is not None:
        num_kept = int(np.searchsorted(earlier.step, first, side="right"))
        head = joined([part_of(earlier.columns, 0, num_kept)], stride)
    rows = joined([head] if later is None else [head, later.columns], stride)
    certain = head.step if later is None else later.step[~later.provisional]
    last = max(int(steps[-1]) if len(steps) else 0 for steps in (head.step, certain))
    return replace(series, stride=stride, columns=rows, provisional=rows.step > last)


def _table(series: StepSeries) -> dict[str, Any]:
    names = ("step", "last", "min", "max", "count", "nonfinite")
    return {
        "party": series.party,
        "series": series.name,
        **dict(zip(names, series.columns.arrays, strict=True)),
        "observed": series.observed,
        "provisional": series.provisional,
    }


# ---- Measured pipeline actions ----
#
# The stages of a pipeline measure their work in one step; here the times of all workers get one
# axis.
#
# Each worker gives times since it began the step, by its own clock, and the time of that
# beginning. Workers of one machine have one clock. Between machines, a message cannot arrive
# before it was sent, which bounds the offset of two clocks from both sides: by activations in one
# direction, by gradients in the other. Half-way between the bounds the error is at most half of
# their distance, as in the Network Time Protocol (RFC 5905, section 8).

_GRADIENTS: Final = ("backward", "input")
"""The kinds of work that produce or consume the gradient of an activation."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measured work of all pipeline stages in one step, in seconds since its first action."""

    step: int
    lanes: Mapping[int, tuple[int, ...]]
    """The numbers of the stages on each worker, keyed by the worker's rank."""
    actions: Mapping[int, Sequence[StageAction]]
    """The actions of each stage, sorted by time."""
    error_s: float
    """The largest error of the estimated clock offset between two workers."""

    @property
    def is_whole(self) -> bool:
        """Return whether all micro-batches were measured, not only a sample of them."""
        numbers = {action.micro_batch for its in self.actions.values() for action in its} - {NONE}
        return numbers == set(range(max(numbers, default=-1) + 1))


def measured_step(history: Mapping[str, StepSeries], num_stages: int) -> MeasuredStep | None:
    """Return the newest step that all stages measured; None if there is none."""
    newest = [_values(history, stage) for stage in range(num_stages)]
    step = max((step for step, _ in newest), default=0)
    if not step or any(stage_step != step for stage_step, _ in newest):
        return None
    reports = [StageReport.of(values) for _, values in newest]
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


def _values(history: Mapping[str, StepSeries], stage: int) -> tuple[int, dict[str, float]]:
    """Return the newest step that a stage has reported, and the values of it, keyed by series."""
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
    """Estimate the start of the step on each rank, in seconds after the start on the first rank;
    return these offsets and the largest possible error of one."""
    between = _bounds(reports)
    ranks = sorted({report.rank for report in reports})
    offsets, errors = {ranks[0]: 0.0}, {ranks[0]: 0.0}
    near = [
        (high - low, ranks[0], rank) for (a, rank), (low, high) in between.items() if a == ranks[0]
    ]
    heapq.heapify(near)
    while near:  # the closest bounds first, which makes every clock as certain as possible
        width, from_rank, rank = heapq.heappop(near)
        if rank in offsets:
            continue
        low, high = between[from_rank, rank]
        offsets[rank] = offsets[from_rank] + _middle(low, high)
        errors[rank] = errors[from_rank] + (0.0 if math.isinf(width) else max(width, 0.0) / 2)
        for (a, b), bounds in between.items():
            if a == rank and b not in offsets:
                heapq.heappush(near, (bounds[1] - bounds[0], rank, b))
    return {rank: offsets.get(rank, 0.0) for rank in ranks}, max(errors.values())


def _middle(low: float, high: float) -> float:
    """Return the midpoint of two bounds, or the only finite one; 0 if neither is finite."""
    finite = [bound for bound in (low, high) if math.isfinite(bound)]
    return sum(finite) / max(len(finite), 1)


def _bounds(reports: Sequence[StageReport]) -> dict[tuple[int, int], tuple[float, float]]:
    """Return, for each pair of ranks that exchange messages or share a clock, (lower, upper) bounds
    on how much later the second rank started the step."""
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
    pairs = {pair for ranks in low for pair in (ranks, ranks[::-1])}
    return {(a, b): (low[a, b], -low[b, a]) for a, b in pairs}


def _least(sender: StageReport, receiver: StageReport, kinds: Sequence[str]) -> float:
    """Return a lower bound on the time by which the receiver started the step after the sender: no
    micro-batch is processed before it arrives."""
    ends = {action.micro_batch: action.end_s for action in sender.actions if action.kind in kinds}
    return max(
        (
            ends[action.micro_batch] - action.begin_s
            for action in receiver.actions
            if action.kind in kinds and action.micro_batch in ends
        ),
        default=-math.inf,
    )

"""The step history of a run as numpy columns, by series."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from stratagem.client.pictures.drawing.scales import short, size_text
from stratagem.client.pictures.picture import NumberTable
from stratagem.common.history import Columns, joined
from stratagem.common.history.columns import part_of
from stratagem.common.history.recording import is_of_newest_segment, unpack_columns
from stratagem.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    import pandas

MAX_BLOCK_ROWS: Final = 65_536
MAX_NAMED: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class StepSeries:
    """Values of one series over the steps of a run, in rows.

    A row stands for the steps k * stride + 1 to (k + 1) * stride: `step` is the last of them that
    is there; `last`, `min` and `max` are of the finite values, NaN where there are none; `count`
    and `nonfinite` say how many values are finite, and how many are not.
    """

    name: str
    party: str
    """Whose steps they are; "" is the whole run."""
    stride: int
    observed: bool
    """Depends on clocks and machines: two runs of one job differ in it."""
    columns: Columns
    provisional: NDArray[np.bool_]
    """By row: whether it has steps of a segment that has not ended, and may be done again."""

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
    """Series by name; those of a party below the root as `party:name`."""

    def __init__(self, series: Iterable[StepSeries]) -> None:
        self._series = {
            f"{each.party}:{each.name}" if each.party else each.name: each for each in series
        }

    @classmethod
    def of(cls, blocks: Iterable[pb.HistoryBlock]) -> "History":
        """Return the history that an answer of a coordinator holds."""
        by_series: dict[tuple[str, str], list[pb.HistoryBlock]] = {}
        for block in blocks:
            by_series.setdefault((block.party, block.series), []).append(block)
        return cls(map(_series, by_series.values()))

    @property
    def next_step(self) -> int:
        """Return the step from which on an answer has to go that continues this one: the first one
        of a row that may change."""
        last_of: dict[str, int] = {}
        for each in self._series.values():  # the segments of a party end for all its series
            certain = each.step[~each.provisional]
            last = int(certain[-1]) if len(certain) else 0
            last_of[each.party] = max(last, last_of.get(each.party, 0))
        last = min(last_of.values(), default=0)
        stride = max((each.stride for each in self._series.values()), default=1)
        return (last - 1) // stride * stride + 1 if last else 1

    def continued(self, later: "History") -> "History":
        """Return this history with a later answer from its next step on."""
        from_step = self.next_step
        names = dict.fromkeys([*self, *later])
        pairs = ((self._series.get(name), later._series.get(name)) for name in names)
        return History(_continued(own, other, from_step) for own, other in pairs)

    def with_newest_of(self, whole: "History") -> "History":
        """Return this part of a history with what only the newest segment of the whole one has."""
        kept = [each for each in self._series.values() if not is_of_newest_segment(each.party)]
        newest = [each for each in whole._series.values() if is_of_newest_segment(each.party)]
        return History([*kept, *newest])

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
        """Return how much there is, and the names: what there is to ask for."""
        steps = max((int(each.step[-1]) for each in self._series.values() if len(each)), default=0)
        names = list(self._series)
        named = ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")
        return f"History({len(names)} series up to step {steps}{named and f': {named}'})"

    def _repr_html_(self) -> str:
        """Return the series with their ends and their ranges as a table."""
        headings = ("series", "party", "rows", "up to step", "last", "least", "greatest", "")
        return NumberTable(headings, tuple(map(_row, self._series.values()))).to_html()

    def bubble(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return, of a pipeline whose `stage/<i>` series are here, the share of a step that its
        workers did not compute, and the steps that it is of: the last one of each row."""
        busy, spans = (
            [each for each in self._series.values() if _is_of_stage(each, name)]
            for name in ("busy_s", "span_s")
        )
        if not busy or len({each.step.tobytes() for each in (*busy, *spans)}) > 1:
            return np.empty(0, np.int64), np.empty(0)
        makespan_s = np.max([each.last for each in spans], axis=0)
        busy_s = np.sum([each.last for each in busy], axis=0)
        return busy[0].step, 1.0 - busy_s / (len(spans) * np.maximum(makespan_s, 1e-12))

    def to_pandas(self) -> "pandas.DataFrame":
        """Return all rows as one table in long form; needs pandas."""
        import pandas as pd

        tables = [pd.DataFrame(_table(each)) for each in self._series.values()]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _row(series: StepSeries) -> tuple[str, ...]:
    end = str(series.step[-1]) if len(series) else ""
    last, low, high = (each[np.isfinite(each)] for each in (series.last, series.min, series.max))
    values = (last[-1], low.min(), high.max()) if min(map(len, (last, low, high))) else ()
    shown = [_shown(series.name, float(value)) for value in values] or ["", "", ""]
    how = "observed" if series.observed else ""
    return (series.name, series.party, str(len(series)), end, *shown, how)


def _shown(name: str, value: float) -> str:
    """Return a value as people read it: a time as one, memory with its unit."""
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


def _continued(own: StepSeries | None, later: StepSeries | None, from_step: int) -> StepSeries:
    """Return a series with its later rows in place of those from a step on."""
    known = cast(StepSeries, own or later)
    stride = max(each.stride for each in (own, later) if each is not None)
    first = (from_step - 1) // stride * stride
    kept = joined([] if own is None else [_up_to(own.columns, first)], stride)
    rows = joined([kept] if later is None else [kept, later.columns], stride)
    certain = kept.step if later is None else later.step[~later.provisional]
    last = max(int(steps[-1]) if len(steps) else 0 for steps in (kept.step, certain))
    return replace(known, stride=stride, columns=rows, provisional=rows.step > last)


def _up_to(columns: Columns, step: int) -> Columns:
    return part_of(columns, 0, int(np.searchsorted(columns.step, step, side="right")))


def _table(series: StepSeries) -> dict[str, Any]:
    names = ("step", "last", "min", "max", "count", "nonfinite")
    return {
        "party": series.party,
        "series": series.name,
        **dict(zip(names, series.columns.arrays, strict=True)),
        "observed": series.observed,
        "provisional": series.provisional,
    }

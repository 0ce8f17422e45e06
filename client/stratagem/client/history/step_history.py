"""The step history of a run as numpy columns, by series."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from stratagem.common.history import Columns, joined
from stratagem.common.history.packing import unpack_columns
from stratagem.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    import pandas

MAX_BLOCK_ROWS: Final = 65_536


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

    def __getitem__(self, name: str) -> StepSeries:
        return self._series[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

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


def _table(series: StepSeries) -> dict[str, Any]:
    names = ("step", "last", "min", "max", "count", "nonfinite")
    return {
        "party": series.party,
        "series": series.name,
        **dict(zip(names, series.columns.arrays, strict=True)),
        "observed": series.observed,
        "provisional": series.provisional,
    }

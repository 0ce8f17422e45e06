"""Rows of the step history as they are stored: of one segment, or of several one after the other.

In a row of several segments no two of them share a row of a series. So it can be cut at the end of
any, as when a run returns to an earlier commit, and says the same as those that it was made of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stratagem.common.base.ids import Party, RunId
from stratagem.common.history import Columns, Series
from stratagem.common.history.columns import ROW_BYTES, concatenated, part_of
from stratagem.common.history.recording import (
    MAX_NAME,
    MAX_SERIES,
    MAX_UNPACKED_BYTES,
    is_of_newest_segment,
    pack,
    unpack,
)

Ends = tuple[tuple[int, int], ...]
"""(segment, its last step), in order."""
_MAX_HEAD_BYTES = MAX_SERIES * (MAX_NAME * 6 + 32)
"""Of the names and numbers beside the rows; a character may be written as six."""


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """The step history of segments: steps from from_step + 1 to to_step, packed."""

    run_id: RunId
    party: Party
    segment: int
    """The last one in it."""
    stride: int
    from_step: int
    to_step: int
    rows: bytes
    ends: Ends = ()
    """Of all segments in it, where it holds those of several."""

    @property
    def all_ends(self) -> Ends:
        """Of all segments in it."""
        return self.ends or ((self.segment, self.to_step),)


def behind(columns: Columns, step: int) -> Columns:
    """Return the rows behind a step at which a row ends."""
    return part_of(columns, int(np.searchsorted(columns.step, step, "right")), len(columns))


def one_row(rows: Sequence[HistoryRow]) -> HistoryRow | None:
    """Return one row that says what these of a party say, which follow each other; None where one
    cannot hold them. Of a party of which only the newest segment is kept, that is its row."""
    if is_of_newest_segment(rows[-1].party):
        return rows[-1]
    pieces: dict[Series, list[Columns]] = {}
    num_rows = 0
    for row in rows:
        for series, columns in unpack(row.rows).items():
            pieces.setdefault(series, []).append(columns)
            num_rows += len(columns)
    fits = num_rows * ROW_BYTES <= MAX_UNPACKED_BYTES - _MAX_HEAD_BYTES
    if not fits or len(pieces) > MAX_SERIES or len({row.stride for row in rows}) > 1:
        return None
    whole = {series: concatenated(pieces[series]) for series in sorted(pieces)}
    ends = tuple(end for row in rows for end in row.all_ends)
    return replace(rows[-1], from_step=rows[0].from_step, rows=pack(whole), ends=ends)


def cut_to(row: HistoryRow, segment: int) -> HistoryRow | None:
    """Return what of a row belongs to segments up to this one; None where nothing does."""
    ends = tuple(end for end in row.all_ends if end[0] <= segment)
    if len(ends) == len(row.all_ends):
        return row
    if not ends:
        return None
    last, step = ends[-1]
    kept: Mapping[Series, Columns] = {
        series: part_of(columns, 0, int(np.searchsorted(columns.step, step, "right")))
        for series, columns in unpack(row.rows).items()
    }
    packed = pack({series: columns for series, columns in kept.items() if len(columns)})
    return replace(row, segment=last, to_step=step, rows=packed, ends=ends if len(ends) > 1 else ())

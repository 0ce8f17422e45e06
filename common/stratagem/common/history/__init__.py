"""The step history: values of each step of a run, in rows that each stand for as many steps.

Nothing here knows torch, the network or a clock. Every number in a row was reported; none is an
average.
"""

from stratagem.common.history.columns import (
    EMPTY,
    MAX_ROWS,
    Columns,
    clipped,
    coarsened,
    joined,
    shortened,
    stride_of,
)
from stratagem.common.history.recording import Recorder, Series, SeriesRows

__all__ = [
    "EMPTY",
    "MAX_ROWS",
    "Columns",
    "Recorder",
    "Series",
    "SeriesRows",
    "clipped",
    "coarsened",
    "joined",
    "shortened",
    "stride_of",
]

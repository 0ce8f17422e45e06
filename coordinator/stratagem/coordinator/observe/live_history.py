"""The step history of segments in flight: what their first members have sent so far, in memory.

Bounded: where a party has sent more than fits, its rows are merged for those who look, and what a
segment's end needs is asked for again. Runs on the event loop. Nothing here outlives the process.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party, RunId
from stratagem.common.history import Columns, Series, joined
from stratagem.common.history.packing import MAX_PART_BYTES, pack, unpack
from stratagem.v1 import worker_pb2

log = structlog.get_logger()

MAX_TAIL_BYTES: Final = 256 * 1024
"""Of one party."""
MAX_BYTES: Final = 64 * 1024 * 1024
"""Of all parties of all runs."""


@dataclass(slots=True)
class HistoryParts:
    """The parts of a segment's history, as they were sent; `is_whole` while none is missing."""

    from_step: int = 0
    parts: list[bytes] = field(default_factory=list)
    is_whole: bool = True

    def add(self, part: worker_pb2.HistoryPart) -> None:
        """Add a part; one with number 0 begins again."""
        if part.number == 0:
            self.from_step, self.parts, self.is_whole = part.from_step, [], True
        is_next = part.number == len(self.parts) and len(part.rows) <= MAX_PART_BYTES
        self.is_whole = self.is_whole and is_next
        if len(part.rows) <= MAX_PART_BYTES:
            self.parts.append(part.rows)

    def are_all(self, result: worker_pb2.TrainResult) -> bool:
        """Return whether these are the parts that a result speaks of."""
        if not self.is_whole or len(self.parts) != result.num_history_parts:
            return False
        return hashlib.sha256(b"".join(self.parts)).hexdigest() == result.history_digest


def merged(parts: Sequence[bytes], stride: int) -> dict[Series, Columns]:
    """Unpack parts whose steps follow each other and merge them. Raises InvalidInputError."""
    pieces: dict[Series, list[Columns]] = {}
    for part in parts:
        for series, columns in unpack(part).items():
            pieces.setdefault(series, []).append(columns)
    return {series: joined(pieces[series], stride) for series in sorted(pieces)}


@dataclass(slots=True)
class SegmentTail:
    """The history of the segment that a party trains now."""

    segment: int
    stride: int
    """Of its rows, as they are shown; that of the parts, or a multiple."""
    sent: HistoryParts = field(default_factory=HistoryParts)

    @property
    def num_bytes(self) -> int:
        """The size of what is kept."""
        return sum(map(len, self.sent.parts))

    def rows(self) -> Mapping[Series, Columns]:
        """Return the rows so far."""
        return merged(self.sent.parts, self.stride)

    def shorten(self) -> None:
        """Keep half as many rows; nothing where what was sent cannot be read."""
        self.stride *= 2
        try:
            rows = merged(self.sent.parts, self.stride)
            self.sent.parts = [pack(rows)]
        except InvalidInputError as error:
            log.warning("a step history cannot be read", reason=str(error))
            self.sent.parts = []
        self.sent.is_whole = False


class LiveHistory:
    """The tails of all parties that train."""

    def __init__(self, max_tail_bytes: int = MAX_TAIL_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self._max_tail_bytes, self._max_bytes = max_tail_bytes, max_bytes
        self._tails: dict[tuple[RunId, Party], SegmentTail] = {}
        self._num_bytes: dict[tuple[RunId, Party], int] = {}

    def add(
        self, run_id: RunId, party: Party, begun: SegmentTail, part: worker_pb2.HistoryPart
    ) -> None:
        """Add a part of a party's segment. begun: the segment without parts, where this is its
        first one."""
        key = (run_id, party)
        tail = self._tails.get(key)
        if part.number == 0 or tail is None or tail.segment != begun.segment:
            tail = self._tails[key] = begun
        tail.sent.add(part)
        self._num_bytes[key] = tail.num_bytes
        while self._num_bytes[key] > self._max_tail_bytes:
            self._shorten(key)
        while sum(self._num_bytes.values()) > self._max_bytes:
            self._shorten(max(self._num_bytes, key=self._num_bytes.__getitem__))

    def _shorten(self, key: tuple[RunId, Party]) -> None:
        self._tails[key].shorten()
        self._num_bytes[key] = self._tails[key].num_bytes

    def tail(self, run_id: RunId, party: Party) -> SegmentTail | None:
        """Return the tail of a party."""
        return self._tails.get((run_id, party))

    def parties(self, run_id: RunId) -> list[Party]:
        """Return the parties of a run that have one."""
        return [party for its, party in self._tails if its == run_id]

    def end(self, run_id: RunId, party: Party, segment: int) -> None:
        """Drop the tail of a segment that has ended."""
        tail = self._tails.get((run_id, party))
        if tail is not None and tail.segment <= segment:
            del self._tails[run_id, party], self._num_bytes[run_id, party]

    def forget(self, run_id: RunId) -> None:
        """Drop the tails of a run that has ended."""
        for party in self.parties(run_id):
            del self._tails[run_id, party], self._num_bytes[run_id, party]

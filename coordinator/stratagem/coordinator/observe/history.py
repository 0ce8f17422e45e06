"""The step history of segments in flight: the rows that members have sent so far, in memory.

The memory is bounded: if a member has sent more than fits, its rows are merged for display, and
requested again at the end of the segment. All runs on the event loop, and ends with the process.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party, RunId, child_party, is_party
from stratagem.common.history import Columns, Series, joined
from stratagem.common.history.recording import MAX_PART_BYTES, pack, unpack
from stratagem.v1 import worker_pb2

log = structlog.get_logger()

MAX_TAIL_BYTES: Final = 256 * 1024
"""The most bytes of rows that are kept of one member of a party."""
MAX_BYTES: Final = 64 * 1024 * 1024
"""The most bytes of rows that are kept of all parties of all runs."""


class PackedRows(NamedTuple):
    """Encoded rows, as a worker has sent them, and the part of a party that they belong to."""

    party: str
    """A part of the party that trains, such as "node/3"; "": the whole party."""
    rows: bytes
    from_step: int = 0
    """The steps that had been applied when the recording began."""


@dataclass(slots=True)
class HistoryParts:
    """A member's parts of a segment's history; `is_whole` is False once a part is missing."""

    parts: list[PackedRows] = field(default_factory=list)
    is_whole: bool = True

    def add(self, part: worker_pb2.HistoryPart) -> None:
        """Add a part of the history; the part with number 0 starts it over."""
        if part.number == 0:
            self.parts, self.is_whole = [], True
        is_fit = len(part.rows) <= MAX_PART_BYTES and is_party(part.party)
        self.is_whole = self.is_whole and is_fit and part.number == len(self.parts)
        if is_fit:
            self.parts.append(PackedRows(part.party, part.rows, part.from_step))

    def are_all(self, result: worker_pb2.TrainResult | worker_pb2.ClientRoundResult) -> bool:
        """Return True if all parts that a result announces have arrived intact."""
        if not self.is_whole or len(self.parts) != result.num_history_parts:
            return False
        whole = b"".join(part.rows for part in self.parts)
        return hashlib.sha256(whole).hexdigest() == result.history_digest


def merged(parts: Sequence[PackedRows], stride: int) -> dict[str, dict[Series, Columns]]:
    """Decode parts with consecutive steps and merge them; return the rows keyed by part of the
    party, sorted by name. Raises InvalidInputError if rows cannot be read."""
    pieces: dict[tuple[str, Series], list[Columns]] = {}
    for part in parts:
        for series, columns in unpack(part.rows).items():
            pieces.setdefault((part.party, series), []).append(columns)
    whole: dict[str, dict[Series, Columns]] = {}
    for party, series in sorted(pieces):
        whole.setdefault(party, {})[series] = joined(pieces[party, series], stride)
    return whole


@dataclass(slots=True)
class SegmentTail:
    """The rows so far, sent by one member, of the segment that a party trains now (its tail)."""

    segment: int
    stride: int
    """The number of steps per row for display: that of the parts, or a multiple."""
    membership: int = 0
    """The membership of the sender; after a change, the rows may belong to another member."""
    sent: HistoryParts = field(default_factory=HistoryParts)

    @property
    def num_bytes(self) -> int:
        """Return the size of the rows that are kept in memory."""
        return sum(len(part.rows) for part in self.sent.parts)

    def shorten(self) -> None:
        """Double the stride, which halves the number of rows; drop rows that cannot be read."""
        self.stride *= 2
        try:
            rows = merged(self.sent.parts, self.stride)
            self.sent.parts = [PackedRows(party, pack(columns)) for party, columns in rows.items()]
        except InvalidInputError as error:
            log.warning("a step history cannot be read", reason=str(error))
            self.sent.parts = []
        self.sent.is_whole = False


class TailKey(NamedTuple):
    """The key of the rows of a segment in flight: the member of a party that has sent them."""

    run_id: RunId
    party: Party
    rank: int


class SentRows(NamedTuple):
    """The rows of a party that one member has sent, in a segment that has not ended."""

    segment: int
    stride: int
    parts: Sequence[PackedRows]


def rows_in_flight(sent: Sequence[SentRows]) -> dict[Series, Columns]:
    """Return the rows keyed by series, each from the first sender that has the series. Raises
    InvalidInputError if rows cannot be read."""
    by_series: dict[Series, Columns] = {}
    for sender in sent:
        for rows in merged(sender.parts, sender.stride).values():
            for series, columns in rows.items():
                by_series.setdefault(series, columns)
    return by_series


class LiveHistory:
    """The rows so far of the segments in flight (segment tails), for all parties that train."""

    def __init__(self, max_tail_bytes: int = MAX_TAIL_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self._max_tail_bytes, self._max_bytes = max_tail_bytes, max_bytes
        self._tails: dict[TailKey, SegmentTail] = {}
        self._num_bytes: dict[TailKey, int] = {}

    def add(self, key: TailKey, begun: SegmentTail, part: worker_pb2.HistoryPart) -> None:
        """Add a part that a member has sent. begun: an empty tail of the segment, used for the
        first part."""
        tail = self._tails.get(key)
        if part.number == 0 or tail is None or tail.segment != begun.segment:
            tail = self._tails[key] = begun
        tail.sent.add(part)
        self._num_bytes[key] = tail.num_bytes
        while self._num_bytes[key] > self._max_tail_bytes:
            self._shorten(key)
        while sum(self._num_bytes.values()) > self._max_bytes:
            self._shorten(max(self._num_bytes, key=self._num_bytes.__getitem__))

    def _shorten(self, key: TailKey) -> None:
        self._tails[key].shorten()
        self._num_bytes[key] = self._tails[key].num_bytes

    def tail(self, key: TailKey) -> SegmentTail | None:
        """Return the segment tail of a member; None if there is none."""
        return self._tails.get(key)

    def parties(self, run_id: RunId) -> list[Party]:
        """Return the parties of a run, and the parts of parties, that have rows in flight."""
        return sorted(
            {
                _whose(key, part.party)
                for key, tail in self._tails.items()
                if key.run_id == run_id
                for part in tail.sent.parts
            }
        )

    def sent(self, run_id: RunId, party: Party) -> list[SentRows]:
        """Return the rows of a party, or of a part of one, sorted from the newest membership to the
        oldest, because a node may have moved from one member to another."""
        of_run = [(key, tail) for key, tail in self._tails.items() if key.run_id == run_id]
        of_run.sort(key=lambda item: (-item[1].segment, -item[1].membership, item[0].rank))
        candidates = [
            SentRows(tail.segment, tail.stride, parts)
            for key, tail in of_run
            if (parts := [part for part in tail.sent.parts if _whose(key, part.party) == party])
        ]
        return [candidate for candidate in candidates if candidate.segment == candidates[0].segment]

    def end(self, run_id: RunId, party: Party) -> None:
        """Drop the rows in memory of a party whose segment has ended."""
        for key in [key for key in self._tails if (key.run_id, key.party) == (run_id, party)]:
            del self._tails[key], self._num_bytes[key]

    def forget(self, run_id: RunId) -> None:
        """Drop the rows in memory of a run that has ended."""
        for key in [key for key in self._tails if key.run_id == run_id]:
            del self._tails[key], self._num_bytes[key]


def _whose(key: TailKey, part: str) -> Party:
    return child_party(key.party, part) if part else key.party

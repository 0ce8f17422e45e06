"""Read one logical stream: rows of some shards of a source, epoch after epoch, at any position.

The row at a position is a function of the source and the seed alone. A reader that is past the
position returns to a mark (a saved position) and reads again from there; another one reads on. If
the source has a state, each mark has one; otherwise a mark leads to the beginning of a shard.
"""

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog
import torch
from torch.utils.data import IterableDataset

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics.keys import POSITIVE, Key, mix
from stratagem.worker.data.rows import seed_generators
from stratagem.worker.user_code.entrypoints import user_code

# ---- Sources of streams ----
#
# Each kind of source appears as numbered shards. A shard of an epoch is opened anew for each
# reading, and has the same rows each time.


class StreamSource(Protocol):
    """Interface of sources of streams: shards of rows, equally many in each epoch."""

    @property
    def num_shards(self) -> int: ...

    def open(self, epoch: int, shard: int) -> Iterable[Any]:
        """Return the rows of one shard in one epoch, from the first on. The result may have
        `state_dict()` and `load_state_dict(state)`, to continue from an earlier position."""


@dataclass(frozen=True, slots=True)
class ShardedSource:
    """An object with `num_shards` and `shard(num_shards, index)`, as `datasets.IterableDataset`."""

    value: Any

    @property
    def num_shards(self) -> int:
        return int(self.value.num_shards)

    def open(self, epoch: int, shard: int) -> Iterable[Any]:
        rows: Iterable[Any] = self.value.shard(num_shards=self.num_shards, index=shard)
        _set_epoch(rows, epoch)
        return rows


@dataclass(frozen=True, slots=True)
class OwnStreams:
    """An object with `streams(epoch)`, which returns the rows of each shard."""

    value: Any
    num_shards: int
    split: str

    def open(self, epoch: int, shard: int) -> Iterable[Any]:
        given = list(self.value.streams(epoch))
        if len(given) != self.num_shards:
            raise InvalidInputError.at(
                f"data.{self.split}",
                f"gives {len(given)} streams for epoch {epoch} and {self.num_shards} for epoch 0; "
                "their number must stay",
            )
        rows: Iterable[Any] = given[shard]
        return rows


@dataclass(frozen=True, slots=True)
class SingleSource:
    """An object with a single shard, each iteration of which begins at the first row."""

    value: Any
    initial: str | None
    """The state before reading, as JSON; None if there is none."""
    num_shards: int = 1

    def open(self, epoch: int, shard: int) -> Iterable[Any]:
        assert shard == 0, shard
        if self.initial is not None:  # a source that has continued from a state would do so again
            self.value.load_state_dict(json.loads(self.initial))
        _set_epoch(self.value, epoch)
        rows: Iterable[Any] = self.value
        return rows


def _set_epoch(rows: Any, epoch: int) -> None:
    if callable(getattr(rows, "set_epoch", None)):
        rows.set_epoch(epoch)


def state_of(rows: Iterable[Any]) -> str | None:
    """Return the state of an iterable as JSON; None if it has none."""
    state_dict = getattr(rows, "state_dict", None)
    if not (callable(state_dict) and callable(getattr(rows, "load_state_dict", None))):
        return None
    state = state_dict()
    try:
        return None if state is None else json.dumps(state, allow_nan=False)
    except (TypeError, ValueError):
        return None


def opened(source: StreamSource, epoch: int, shard: int, state: str | None) -> Iterable[Any]:
    """Open a shard at its first row, or at the position of a state."""
    rows = source.open(epoch, shard)
    if state is not None:
        rows.load_state_dict(json.loads(state))  # type: ignore[attr-defined]
    return rows


def stream_source(value: Any, split: str) -> StreamSource | None:
    """Return the source of an object that iterates over rows; None for other objects."""
    if not _is_stream(value):
        return None
    with user_code(f"looking at data.{split}"):
        if callable(getattr(value, "streams", None)):
            source: StreamSource = OwnStreams(value, len(list(value.streams(0))), split)
        elif callable(getattr(value, "shard", None)) and hasattr(value, "num_shards"):
            source = ShardedSource(value)
        else:
            if not isinstance(value, IterableDataset) and iter(value) is value:
                kind = type(value).__name__
                raise InvalidInputError.at(
                    f"data.{split}",
                    f"is a {kind}, which can be read only once; give an object whose iter() begins "
                    "anew, such as an IterableDataset",
                )
            source = SingleSource(value, state_of(value))
    if source.num_shards < 1:
        raise InvalidInputError.at(f"data.{split}", "has no shard to read rows from")
    return source


def _is_stream(value: Any) -> bool:
    if isinstance(value, IterableDataset):
        return True
    kind = type(value)
    if hasattr(kind, "__getitem__") or hasattr(kind, "__len__"):
        return False
    return callable(getattr(value, "streams", None)) or hasattr(kind, "__iter__")


# ---- Stream reader ----

log = structlog.get_logger(__name__)

_MARK_EVERY: Final = 256
"""Number of rows between two marks, since saving a source's state takes about 0.1 ms."""
_NUM_MARKS: Final = 4
"""Number of marks that are kept."""
_SAY_EVERY_S: Final = 10.0
_END: Final = object()


@dataclass(frozen=True, slots=True)
class Mark:
    """A read position: from here a stream can be read again. position: number of rows before it."""

    position: int = 0
    epoch: int = 0
    place: int = 0
    """Index of the shard among the stream's shards."""
    row: int = 0
    """Number of rows in the epoch before the mark."""
    row_of_shard: int = 0
    state: str | None = None
    """State of the source as JSON; None to read the shard from its beginning."""


@dataclass(frozen=True, slots=True)
class StreamRules:
    """The values that determine the rows of a stream.

    split: the name of the split, for errors. key: the key of random numbers, which is extended by
    epoch and row. block_rows: the number of rows that are shuffled together. has_states: a saved
    state of the source determines all rows after it.
    """

    split: str
    number: int
    shards: Sequence[int]
    key: Key
    block_rows: int | None = None
    has_states: bool = False


class StreamReader:
    """Reads the rows of one stream. Used by one thread. It seeds the generators for each row; the
    caller restores them."""

    def __init__(self, source: StreamSource, rules: StreamRules) -> None:
        self._source, self._rules = source, rules
        self._marks: list[Mark] = []
        self._rows: Iterable[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._go_to(Mark())

    def row(self, position: int) -> Any:
        """Return the row at a position, counted over all epochs from 0."""
        if position < self._position or self._leaps(position):
            before = (mark for mark in self._marks if mark.position <= position)
            self._go_to(max(before, key=lambda mark: mark.position, default=Mark()))
        if position - self._position > _MARK_EVERY:
            self._read_up_to(position)
        while self._position < position:
            self._next()
        return self._next()

    def epoch_rows(self, epoch: int) -> Iterator[Any]:
        """Yield all rows of this stream in one epoch."""
        self._go_to(Mark(epoch=epoch))
        while block := self._read_block():
            yield from block

    def mark(self) -> Mark:
        """Return a mark (position to read from again) at the last row or before, in its block."""
        return self._mark if self._ready else self._here()

    def add_mark(self, mark: Mark) -> None:
        """Add a mark made by another reader of the same stream."""
        self._marks.append(mark)

    def _leaps(self, position: int) -> bool:
        """Return whether reading from some mark (saved position) reaches a later position sooner
        than reading on."""
        return any(self._position < mark.position <= position for mark in self._marks)

    def _go_to(self, mark: Mark) -> None:
        self._mark, self._position = mark, mark.position
        self._epoch, self._row = mark.epoch, mark.row
        self._place, self._row_of_shard = mark.place, 0
        self._rows = self._iterator = None
        self._ready: deque[Any] = deque()
        if mark.state is not None and self._rules.has_states:
            self._open(mark.state)
            self._row_of_shard = mark.row_of_shard
            return
        self._row -= mark.row_of_shard
        for _ in range(mark.row_of_shard):
            self._read()

    def _here(self) -> Mark:
        """Make a mark at the next row; called only between two blocks."""
        state = None
        if self._rules.has_states and self._iterator is not None and self._rows is not None:
            with user_code(f"asking data.{self._rules.split} for its state"):
                state = state_of(self._rows)
        place = self._epoch, self._place, self._row, self._row_of_shard
        return Mark(self._position, *place, state)

    def _next(self) -> Any:
        while not self._ready:
            is_due = self._position - self._mark.position >= _MARK_EVERY
            if is_due or self._rules.block_rows is not None:
                self._mark = self._here()
                self._marks = [*self._marks[-_NUM_MARKS:], self._mark]
            self._ready.extend(self._read_block())
            if not self._ready:
                self._begin_epoch()
        self._position += 1
        return self._ready.popleft()

    def _begin_epoch(self) -> None:
        if self._row == 0:
            rules = self._rules
            raise InvalidInputError.at(
                f"data.{rules.split}", f"gives stream {rules.number} no row in epoch {self._epoch}"
            )
        self._epoch, self._place, self._row, self._row_of_shard = self._epoch + 1, 0, 0, 0

    def _read_block(self) -> list[Any]:
        """Read the next block: the rows that are shuffled together (one by default), none at the
        end of an epoch."""
        first, size = self._row, self._rules.block_rows or 1
        rows: list[Any] = []
        while len(rows) < size and (row := self._read()) is not _END:
            rows.append(row)
        if self._rules.block_rows is None:
            return rows
        key = mix(*self._rules.key, "block", self._epoch, first // size)
        draw = torch.Generator().manual_seed(key & POSITIVE)
        return [rows[i] for i in torch.randperm(len(rows), generator=draw).tolist()]

    def _read(self) -> Any:
        """Read the next row of the epoch, with the generators seeded for it."""
        rules = self._rules
        while self._place < len(rules.shards):
            if self._iterator is None:
                self._open(None)
            assert self._iterator is not None
            seed_generators(mix(*rules.key, self._epoch, self._row))
            what = f"reading row {self._row} of epoch {self._epoch} of stream {rules.number}"
            with user_code(f"{what} of data.{rules.split}"):
                row = next(self._iterator, _END)
            if row is not _END:
                self._row += 1
                self._row_of_shard += 1
                return row
            self._rows = self._iterator = None
            self._place, self._row_of_shard = self._place + 1, 0
        return _END

    def _open(self, state: str | None) -> None:
        rules, shard = self._rules, self._rules.shards[self._place]
        with user_code(f"opening shard {shard} of data.{rules.split} in epoch {self._epoch}"):
            seed_generators(mix(*rules.key, "open", self._epoch, shard))
            self._rows = opened(self._source, self._epoch, shard, state)
            self._iterator = iter(self._rows)

    def _read_up_to(self, position: int) -> None:
        """Skip rows up to a position; log the progress at intervals."""
        first, began_s = self._position, time.monotonic()
        said_s = began_s
        while self._position < position:
            self._next()
            now_s = time.monotonic()
            if now_s - said_s > _SAY_EVERY_S:
                said_s, rate = now_s, (self._position - first) / (now_s - began_s)
                log.info(
                    "reading a stream again up to where the run is",
                    stream=self._rules.number,
                    row=self._position,
                    of=position,
                    rows_per_s=round(rate),
                    seconds_left=round((position - self._position) / rate),
                )

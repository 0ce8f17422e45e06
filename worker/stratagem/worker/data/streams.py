"""Number training rows that come as a stream: number n is row n % B of step n // B.

A batch of B rows is cut into R shards. Of L logical streams, stream s belongs to shard s mod R and
reads the source's shards s, s + L, ...; the rows of a shard are taken from its streams in turn. So
the stream and the position of a number are a function of (B, R, L), in every process.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Final

from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.numerics.keys import Key
from stratagem.common.numerics.shards import split_rows
from stratagem.common.strategy import num_shards_of
from stratagem.worker.data.rows import BatchKeys, Collate, collated, generators_kept, one_thread
from stratagem.worker.data.stream_reader import Mark, StreamReader, StreamRules, StreamSource

_NO_KEYS: Final = BatchKeys()


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """The assignment of step rows to streams."""

    batch_size: int
    num_shards: int
    num_streams: int

    def place(self, number: int) -> tuple[int, int]:
        """Return (stream, position in it) of a numbered row."""
        step, offset = divmod(number, self.batch_size)
        pieces = split_rows(self.batch_size, self.num_shards)
        shard = next(i for i, piece in enumerate(pieces) if offset < piece.stop)
        row_of_shard = step * len(pieces[shard]) + offset - pieces[shard].start
        position, turn = divmod(row_of_shard, self.num_streams // self.num_shards)
        return shard + turn * self.num_shards, position


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """Rows that were fetched and are not collated yet."""

    rows: list[Any]
    collate: Collate
    split: str

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor, keys: BatchKeys) -> tuple[Any, Any]:
        """Return (x, y) of these rows; the states of all random generators are restored."""
        with generators_kept(), one_thread():
            return collated(
                [self.rows[i] for i in indices.tolist()], self.collate, keys, self.split
            )

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        """Return the same as `batch`, for a caller without keys of random numbers."""
        return self.batch(indices, _NO_KEYS)


@dataclass(frozen=True, slots=True)
class StreamedSplit:
    """A split whose rows come as a stream, before the job's rules for reading it are known."""

    source: StreamSource
    split: str
    collate: Collate

    def __len__(self) -> int:
        """Return 0: rows of a stream are not numbered before they are read."""
        return 0

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class StreamDataset:
    """Data set of a source's streams, with the function that collates their rows.

    part: this client's number and the count of clients, under Federated. Used by one thread.
    """

    source: StreamSource
    split: str
    collate: Collate
    job: JobSpec
    has_states: bool = False
    part: tuple[int, int] = (0, 1)
    _readers: dict[int, StreamReader] = field(default_factory=dict, compare=False)
    _marks: dict[int, Mark] = field(default_factory=dict, compare=False)
    """Read positions (marks), by stream, of streams that other processes read."""

    def __len__(self) -> int:
        """Return 0: rows of a stream are not numbered before they are read."""
        return 0

    @property
    def layout(self) -> StreamLayout:
        num_shards = num_shards_of(self.job.strategy)
        num_streams = self.job.data.streams or num_shards
        return StreamLayout(self.job.batch_size, num_shards, num_streams)

    def batch(self, indices: Tensor, keys: BatchKeys) -> tuple[Any, Any]:
        """Return (x, y) of these rows; the states of all random generators are restored."""
        layout = self.layout
        with generators_kept(), one_thread():
            rows = []
            for number in indices.tolist():
                stream, position = layout.place(number)
                rows.append(self._reader(stream, layout.num_streams).row(position))
            return collated(rows, self.collate, keys, self.split)

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        """Return the same as `batch`, for a caller without keys of random numbers."""
        return self.batch(indices, _NO_KEYS)

    def head(self, num_rows: int) -> FetchedRows:
        """Return the first rows of the first stream."""
        with generators_kept():
            reader = StreamReader(self.source, self._rules(0, 1, (self.job.seed, "row", "head")))
            rows = list(islice(reader.epoch_rows(0), num_rows))
            return FetchedRows(rows, self.collate, self.split)

    def of_client(self, number: int, num_clients: int) -> "StreamDataset":
        """Return the data set of one federated client: shards c, c + C, ... of the source."""
        if self.source.num_shards < num_clients:
            raise InvalidInputError.at(
                f"data.{self.split}",
                f"has {self.source.num_shards} shards for {num_clients} clients (num_clients), "
                "and each needs one of its own; a data function that takes client_id and "
                "num_clients gives a client's own stream",
            )
        return replace(self, part=(number, num_clients), _readers={}, _marks={})

    def client_batches(self, client: int, epoch: int) -> Iterator[FetchedRows]:
        """Yield the batches of one epoch of the client's rows; the last one may be smaller."""
        number, num_clients = self.part
        rules = self._rules(number, num_clients, (self.job.seed, "row", "client", client))
        rows = StreamReader(self.source, rules).epoch_rows(epoch)
        while True:
            with generators_kept(), one_thread():
                batch = list(islice(rows, self.job.batch_size))
            if not batch:
                return
            yield FetchedRows(batch, self.collate, self.split)

    def marks(self) -> dict[int, str]:
        """Return the read position (mark) of each stream that is read here, as JSON."""
        return {
            number: json.dumps(asdict(reader.mark()))
            for number, reader in sorted(self._readers.items())
        }

    def add_marks(self, marks: Mapping[int, str]) -> None:
        """Add read positions of any streams; they do not change any rows."""
        for number, text in marks.items():
            self._marks[number] = mark = Mark(**json.loads(text))
            if number in self._readers:
                self._readers[number].add_mark(mark)

    def check_layout(self) -> None:
        """Raise InvalidInputError if there are more streams than shards."""
        num_streams, num_shards = self.layout.num_streams, self.source.num_shards
        if num_streams > num_shards:
            what = "data.streams" if self.job.data.streams else "strategy.num_replicas"
            raise InvalidInputError.at(
                f"data.{self.split}",
                f"has {num_shards} {'shard' if num_shards == 1 else 'shards'} for {num_streams} "
                f"streams ({what}), and each needs one of its own; an object with num_shards, "
                "shard() and set_epoch(), or with streams(epoch), has several",
            )

    def _reader(self, number: int, num_streams: int) -> StreamReader:
        reader = self._readers.get(number)
        if reader is None:
            rules = self._rules(number, num_streams, (self.job.seed, "row", "stream", number))
            reader = self._readers[number] = StreamReader(self.source, rules)
            if number in self._marks:
                reader.add_mark(self._marks[number])
        return reader

    def _rules(self, number: int, stride: int, key: Key) -> StreamRules:
        shards = range(number, self.source.num_shards, stride)
        block_rows = self.job.data.shuffle_rows
        return StreamRules(self.split, number, shards, key, block_rows, self.has_states)

"""How rows of a stream are read in the reference loops: from the beginning, one after the other.

Stream s of L reads the source's shards s, s + L, ... in every epoch, and begins the next one at its
end. Before each row the generators are seeded from (seed, "row", "stream", s, epoch, row of the
epoch). Blocks of `shuffle_rows` rows are permuted. A batch is cut into shards; those of stream s
belong to shard s mod R, and a shard's rows are taken from its streams in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.numerics.keys import Key, mix
from stratagem.common.numerics.shards import split_rows
from stratagem.common.strategy import DataParallel
from stratagem.worker.data.streams import StreamDataset
from tests.reference.seeding import seed_all

_END = object()


class PlainRows:
    """Rows that have been read, by number."""

    def __init__(self, rows: dict[int, Any], collate: Any) -> None:
        self.rows, self.collate = rows, collate

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


class PlainStreams(PlainRows):
    """Rows of a stream, numbered over all steps; they are asked for in order."""

    def __init__(self, job: JobSpec, data: StreamDataset) -> None:
        super().__init__({}, data.collate)
        self.batch_size = job.batch_size
        self.num_shards = job.strategy.num_replicas if isinstance(job.strategy, DataParallel) else 1
        num_streams = job.data.streams or self.num_shards
        self.streams = [
            _endless(job, data, stream, num_streams, (job.seed, "row", "stream", stream))
            for stream in range(num_streams)
        ]
        self.turns = [0] * self.num_shards
        self.num_read = 0

    def __getitem__(self, number: int) -> Any:
        while number >= self.num_read:
            self._read_step()
        return self.rows[number]

    def _read_step(self) -> None:
        self.rows = {}
        for shard, piece in enumerate(split_rows(self.batch_size, self.num_shards)):
            streams = self.streams[shard :: self.num_shards]
            for _ in piece:
                stream = streams[self.turns[shard] % len(streams)]
                self.rows[self.num_read] = next(stream)
                self.turns[shard] += 1
                self.num_read += 1


def _endless(
    job: JobSpec, data: StreamDataset, stream: int, num_streams: int, key: Key
) -> Iterator[Any]:
    for epoch in count():
        yield from _epoch(job, data, range(stream, data.source.num_shards, num_streams), key, epoch)


def _epoch(job: JobSpec, data: StreamDataset, shards: range, key: Key, epoch: int) -> Iterator[Any]:
    found: list[Any] = []
    for shard in shards:
        rows = iter(data.source.open(epoch, shard))
        while True:
            seed_all(mix(*key, epoch, len(found)))
            if (row := next(rows, _END)) is _END:
                break
            found.append(row)
    size = job.data.shuffle_rows or 1
    for block, start in enumerate(range(0, len(found), size)):
        part = found[start : start + size]
        draw = torch.Generator().manual_seed(mix(*key, "block", epoch, block) % 2**63)
        for place in torch.randperm(len(part), generator=draw).tolist():
            yield part[place]


def client_batches(
    job: JobSpec, data: StreamDataset, client: int, epoch: int
) -> list[tuple[PlainRows, Tensor]]:
    """The batches of a federated client, who reads its part of the stream to the end."""
    number, num_clients = data.part
    shards = range(number, data.source.num_shards, num_clients)
    found = list(_epoch(job, data, shards, (job.seed, "row", "client", client), epoch))
    rows = PlainRows(dict(enumerate(found)), data.collate)
    return [(rows, each) for each in torch.split(torch.arange(len(found)), job.batch_size)]

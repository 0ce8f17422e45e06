"""How a batch of a data set is read in the reference loops: keyed, row by row where it has rows.

A row is fetched with Python's, numpy's and torch's generators seeded from (seed, "row", epoch, row,
how often it came before); the batch is collated with a key of its own; then the model's key is in
force. Data sets with `take` draw from the model's generator.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.numerics.keys import Key, mix
from stratagem.worker.data.datasets import Dataset, Gather, Subset, map_tensors
from stratagem.worker.data.rows import RowDataset
from stratagem.worker.data.streams import StreamDataset
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.seeding import seed_all
from tests.reference.stream_rows import PlainRows


def read(
    gather: Gather,
    dataset: Dataset | PlainRows,
    rows: Tensor,
    row_key: Key,
    key: Key,
    randomness: KeyedRandomness | None = None,
) -> tuple[Any, Any]:
    """(x, y) of these rows, with the generators seeded for the model. key: of the batch."""
    if randomness is not None:
        randomness.begin(*key)
    while isinstance(dataset, Subset):
        rows, dataset = dataset.rows[rows], dataset.base
    if isinstance(dataset, PlainRows):
        found = [dataset[row] for row in rows.tolist()]
    elif isinstance(dataset, RowDataset):
        found = [_fetched(dataset, row, row_key) for row in rows.tolist()]
    else:
        return gather(dataset, rows, "reference")
    seed_all(mix("collate", *key))
    batch = map_tensors(dataset.collate(found), gather.place)
    if randomness is not None:
        randomness.begin(*key)
    return (batch[0], batch[1]) if isinstance(batch, list | tuple) else (batch, batch)


def _fetched(dataset: RowDataset, row: int, row_key: Key) -> Any:
    occurrence, number = divmod(row, len(dataset))
    seed_all(mix(*row_key, number, occurrence))
    return dataset.source[number]


def epoch_batches(
    job: JobSpec, entrypoints: EntryPoints, dataset: Dataset, epoch: int
) -> list[Tensor]:
    """The batches of an epoch; a row that came before has its number plus that of all rows. Of
    streams, each step counts as an epoch."""
    if isinstance(dataset, StreamDataset):
        return [torch.arange(epoch * job.batch_size, (epoch + 1) * job.batch_size)]
    order, num_rows = job.data.order, len(dataset)
    draw = torch.Generator().manual_seed(job.seed + epoch)
    given = dataset.source if isinstance(dataset, RowDataset) else dataset
    if order is None or order.by == "shuffle":
        return list(torch.split(torch.randperm(num_rows, generator=draw), job.batch_size))
    if order.by == "sequential":
        return list(torch.split(torch.arange(num_rows), job.batch_size))
    if order.lengths is not None:
        lengths = entrypoints.resolve(order.lengths)(given)
        rows = torch.randperm(num_rows, generator=draw).tolist()
        size = job.batch_size
        wide = size * (order.window or 100)
        batches = []
        for start in range(0, num_rows, wide):
            window = sorted(rows[start : start + wide], key=lambda row: lengths[row])
            batches += [window[place : place + size] for place in range(0, len(window), size)]
        batches = [batches[i] for i in torch.randperm(len(batches), generator=draw).tolist()]
    elif order.weights is not None:
        weights = torch.as_tensor(entrypoints.resolve(order.weights)(given), dtype=torch.float64)
        drawn = torch.multinomial(weights, order.num_rows or num_rows, True, generator=draw)
        batches = [part.tolist() for part in torch.split(drawn, job.batch_size)]
    else:
        assert order.entrypoint is not None
        seed_all(mix(job.seed, "order", epoch))
        batches = [list(batch) for batch in entrypoints.resolve(order.entrypoint)(given, epoch)]
    counts: Counter[int] = Counter()
    for batch in batches:
        for place, row in enumerate(batch):
            if isinstance(dataset, RowDataset):
                batch[place] += num_rows * counts[row]
            counts[row] += 1
    return [torch.tensor(batch) for batch in batches]

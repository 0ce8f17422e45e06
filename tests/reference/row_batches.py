"""How a batch of a data set is read in the reference loops: keyed, row by row where it has rows.

A row is fetched with Python's, numpy's and torch's generators seeded from (seed, "row", epoch, row,
how often it came before); the batch is collated with a key of its own; then the model's key is in
force. Data sets with `take` draw from the model's generator.
"""

import random
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.numerics.mixed_keys import Key, mix
from stratagem.worker.data.datasets import Dataset, Gather, Subset, map_tensors
from stratagem.worker.data.row_datasets import RowDataset
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.user_code.entrypoints import EntryPoints


def read(
    gather: Gather,
    dataset: Dataset,
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
    if not isinstance(dataset, RowDataset):
        return gather(dataset, rows, "reference")
    found = []
    for row in rows.tolist():
        occurrence, number = divmod(row, len(dataset))
        _seed(mix(*row_key, number, occurrence))
        found.append(dataset.source[number])
    _seed(mix("collate", *key))
    batch = map_tensors(dataset.collate(found), gather.place)
    if randomness is not None:
        randomness.begin(*key)
    return (batch[0], batch[1]) if isinstance(batch, list | tuple) else (batch, batch)


def _seed(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key % 2**63)


def epoch_batches(
    job: JobSpec, entrypoints: EntryPoints, dataset: Dataset, epoch: int
) -> list[Tensor]:
    """The batches of an epoch; a row that came before has its number plus that of all rows."""
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
        _seed(mix(job.seed, "order", epoch))
        batches = [list(batch) for batch in entrypoints.resolve(order.entrypoint)(given, epoch)]
    counts: Counter[int] = Counter()
    for batch in batches:
        for place, row in enumerate(batch):
            if isinstance(dataset, RowDataset):
                batch[place] += num_rows * counts[row]
            counts[row] += 1
    return [torch.tensor(batch) for batch in batches]

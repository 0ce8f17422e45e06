"""How a batch of a data set is read in the reference loops: keyed, row by row where it has rows.

A row is fetched with Python's, numpy's and torch's generators seeded from (seed, "row", epoch, row,
how often it came before); the batch is collated with a key of its own; then the model's key is in
force. Data sets with `take` draw from the model's generator.
"""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratagem.common.numerics.mixed_keys import Key, mix
from stratagem.worker.data.datasets import Dataset, Gather, Subset, map_tensors
from stratagem.worker.data.row_datasets import RowDataset
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness


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
        _seed(mix(*row_key, row, 0))
        found.append(dataset.source[row])
    _seed(mix("collate", *key))
    batch = map_tensors(dataset.collate(found), gather.place)
    if randomness is not None:
        randomness.begin(*key)
    return (batch[0], batch[1]) if isinstance(batch, list | tuple) else (batch, batch)


def _seed(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key % 2**63)

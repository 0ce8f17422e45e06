"""What a user would write: orders of the rows of data sets that jobs of the tests name."""

import random
from typing import Any

import numpy as np
import torch


def row_weights(data: Any) -> list[float]:
    """Of tensors (x, y) or of rows; few rows are drawn often."""
    return [10.0 if row % 7 == 0 else 0.5 for row in range(_num_rows(data))]


def two_weights(data: Any) -> list[float]:
    return [1.0, 2.0]


def row_lengths(data: Any) -> list[int]:
    return [(13 * row) % 17 for row in range(_num_rows(data))]


def row_batches(data: Any, epoch: int) -> list[list[int]]:
    """Batches of unequal size, drawn at random; a row may come twice."""
    num_rows = _num_rows(data)
    return [[random.randrange(num_rows) for _ in range(size)] for size in (16, 3, 9)]


def sampled(data: Any, epoch: int) -> Any:
    """A sampler of torch, which draws from torch's default generator."""
    return torch.utils.data.RandomSampler(range(_num_rows(data)))


def fewer_batches(data: Any, epoch: int) -> list[list[int]]:
    return [[0]] * (3 - epoch)


def wrong_rows(data: Any, epoch: int) -> list[int]:
    return [0, 99]


def large_batches(data: Any, epoch: int) -> list[list[int]]:
    return [[0], [0] * 17]


def impure_order(data: Any, epoch: int) -> list[int]:
    return np.random.default_rng().permutation(50).tolist()


def distributed(data: Any, epoch: int) -> Any:
    return torch.utils.data.DistributedSampler(range(50), num_replicas=2, rank=0)  # type: ignore[arg-type]


def _num_rows(data: Any) -> int:
    return len(data[0]) if isinstance(data, tuple) else len(data)

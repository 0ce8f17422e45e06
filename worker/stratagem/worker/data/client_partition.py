"""Splits the rows of one data set among federated clients, when the clients are simulated.

Every method gives each row to exactly one client and depends on its arguments only. Must not know
data sets: it sees labels and counts.
"""

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import PartitionSpec
from stratagem.common.numerics.shards import split_rows

_LABELS_PER_CLIENT = 2

Rows: TypeAlias = NDArray[np.int64]


def contiguous(num_rows: int, num_clients: int) -> list[Tensor]:
    """Consecutive pieces whose sizes differ by at most one."""
    pieces = split_rows(num_rows, num_clients)
    return [torch.arange(piece.start, piece.stop) for piece in pieces]


def by_label(labels: Tensor, num_clients: int, labels_per_client: int, seed: int) -> list[Tensor]:
    """Rows sorted by label, cut into equal pieces; each client gets `labels_per_client` of them."""
    order = torch.sort(labels, stable=True).indices
    pieces = split_rows(len(labels), num_clients * labels_per_client)
    deal = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = []
    for client in range(num_clients):
        hand = deal[client * labels_per_client : (client + 1) * labels_per_client]
        rows = [order[pieces[piece].start : pieces[piece].stop] for piece in hand]
        parts.append(torch.cat(rows).sort().values)
    return parts


def dirichlet(labels: Tensor, num_clients: int, alpha: float, seed: int) -> list[Tensor]:
    """The rows of each label split in proportions drawn from Dirichlet(alpha).

    A client that would be left without rows takes one from the largest client.
    """
    generator = np.random.default_rng(seed)
    values = labels.numpy()
    parts: list[list[Rows]] = [[] for _ in range(num_clients)]
    for label in np.unique(values):
        rows = generator.permutation(np.flatnonzero(values == label))
        shares = generator.dirichlet(np.full(num_clients, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    none = np.empty(0, np.int64)  # there may be no labels at all
    merged = [np.sort(np.concatenate([none, *part])) for part in parts]
    return [torch.from_numpy(rows) for rows in _without_empty(merged)]


def _without_empty(parts: list[Rows]) -> list[Rows]:
    for client, rows in enumerate(parts):
        largest = max(range(len(parts)), key=lambda index: len(parts[index]))
        if len(rows) == 0 and len(parts[largest]) > 1:
            parts[client], parts[largest] = parts[largest][:1], parts[largest][1:]
    return parts


def client_rows(
    partition: PartitionSpec | None,
    labels: Tensor | None,
    num_rows: int,
    num_clients: int,
    seed: int,
) -> list[Tensor]:
    """The rows of every client. `labels` may be None where the method needs none."""
    if partition is None or partition.method == "contiguous":
        return contiguous(num_rows, num_clients)
    if labels is None or labels.dim() != 1 or labels.is_floating_point():
        raise InvalidInputError.at(
            "partition.method",
            f'"{partition.method}" needs one integer label per row; "contiguous" does not',
        )
    if partition.method == "by_label":
        per_client = partition.labels_per_client or _LABELS_PER_CLIENT
        return by_label(labels, num_clients, per_client, seed)
    return dirichlet(labels, num_clients, partition.alpha, seed)

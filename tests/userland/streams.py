"""Training rows that come as streams, from each kind of source."""

import importlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from tests.userland.data import Gated, Rows, rows_of
from tests.userland.models import NUM_FEATURES


def _augmented(rows: Gated, row: int) -> Rows:
    x, y = rows.take(torch.tensor([row]))
    scale = 1.0 + 0.1 * random.random() + 0.1 * float(np.random.rand())
    return scale * x[0] + 0.1 * torch.randn(NUM_FEATURES), y[0]


class Shard:
    """Some rows, one after the other; counts how many have been read."""

    num_read = 0

    def __init__(self, rows: Gated) -> None:
        self.rows, self.next_row = rows, 0

    def __iter__(self) -> Iterator[Rows]:
        while self.next_row < len(self.rows):
            Shard.num_read += 1
            self.next_row += 1
            yield _augmented(self.rows, self.next_row - 1)


class StatefulShard(Shard):
    """The same with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"next_row": self.next_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_row = state["next_row"]


class Shards:
    """Shards of unequal length, which are other ones in each epoch."""

    def __init__(self, num_shards: int, folder: str, kind: type[Shard], num_rows: int) -> None:
        self.num_shards, self.kind, self.num_rows = num_shards, kind, num_rows
        # One for all, so that gates count the rows of all shards.
        self.rows = Gated(rows_of(1), folder, "streamed")

    def streams(self, epoch: int) -> list[Shard]:
        return [self._shard(epoch, shard) for shard in range(self.num_shards)]

    def _shard(self, epoch: int, shard: int) -> Shard:
        rows = Gated(rows_of(self.num_rows + shard, seed=100 * epoch + shard), "", "")
        rows.take = self._counted(rows.take)  # type: ignore[method-assign]
        return self.kind(rows)

    def _counted(self, take: Any) -> Any:
        def counted(indices: Any) -> Rows:
            self.rows.take(torch.tensor([0]))
            taken: Rows = take(indices)
            return taken

        return counted


def _with_test(train: Any) -> dict[str, Any]:
    return {"train": train, "test": rows_of(23, seed=6)}


def shards(
    num_shards: int = 6, folder: str = "nowhere", *, stateful: bool = False, num_rows: int = 5
) -> dict[str, Any]:
    """An object with `streams(epoch)`."""
    kind = StatefulShard if stateful else Shard
    return _with_test(Shards(num_shards, folder, kind, num_rows))


def own_shards(client_id: int = 0, num_clients: int = 1) -> dict[str, Any]:
    """Each client's own stream, of several shards."""
    return _with_test(Shards(2, "nowhere", Shard, 4 + client_id))


def hugging_face(
    num_shards: int = 4, *, batched: bool = False, buffered: bool = False, num_rows: int = 5
) -> dict[str, Any]:
    """`datasets.IterableDataset`, augmented as its rows are read."""
    datasets = importlib.import_module("datasets")  # an extra

    def rows(shards: list[int]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            x, y = rows_of(num_rows + shard, seed=shard)
            for features, label in zip(x.tolist(), y.tolist(), strict=True):
                yield {"x": features, "y": label}

    def noisy(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": [value + 0.1 * random.random() for value in row["x"]]}

    def noisy_batch(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": [[value + 0.1 * random.random() for value in x] for x in batch["x"]]}

    made = datasets.IterableDataset.from_generator(
        rows, gen_kwargs={"shards": list(range(num_shards))}
    )
    if buffered:
        made = made.shuffle(seed=3, buffer_size=4)
    if batched:
        return _with_test(made.map(noisy_batch, batched=True, batch_size=3))
    return _with_test(made.map(noisy))


def named(rows: list[dict[str, Any]]) -> Rows:
    """A collate of rows that are dicts."""
    x = torch.tensor([row["x"] for row in rows])
    return x, torch.tensor([row["y"] for row in rows])


class Plain(IterableDataset[Rows]):
    """A torch `IterableDataset` without shards. impure: draws from a generator of its own."""

    def __init__(self, num_rows: int, *, impure: bool) -> None:
        self.num_rows, self.impure = num_rows, impure

    def __iter__(self) -> Iterator[Rows]:
        x, y = rows_of(self.num_rows)
        for features, label in zip(x, y, strict=True):
            noise = float(np.random.default_rng().random()) if self.impure else random.random()
            yield features + noise, label


def plain(num_rows: int = 11, *, impure: bool = False) -> dict[str, Any]:
    return _with_test(Plain(num_rows, impure=impure))


class Shifted(Plain):
    """A stream that is another one whenever it is made, and always the same afterwards."""

    def __init__(self) -> None:
        super().__init__(11, impure=False)
        self.shift = float(np.random.default_rng().random())

    def __iter__(self) -> Iterator[Rows]:
        return ((features + self.shift, label) for features, label in super().__iter__())


def unseeded() -> dict[str, Any]:
    return _with_test(Shifted())


def streamed_test() -> dict[str, Any]:
    """What is evaluated is a stream as well."""
    return {"train": Plain(11, impure=False), "test": Plain(5, impure=False)}


def silent() -> dict[str, Any]:
    """A stream without rows."""
    return _with_test(Plain(0, impure=False))

"""Where streamed rows come from: each kind of source as numbered shards that can be opened.

A shard of an epoch is opened anew whenever it is to be read, and gives the same rows each time.
Must not know which rows are wanted, nor by whom.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.user_code.entrypoints import user_code


class StreamSource(Protocol):
    """Shards of rows, the same number of them in each epoch."""

    @property
    def num_shards(self) -> int: ...

    def open(self, epoch: int, shard: int) -> Iterable[Any]:
        """Returns the rows of one shard in one epoch, from the first on. What it returns may have
        `state_dict()` and `load_state_dict(state)`, to go on from where it was."""


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
        found = list(self.value.streams(epoch))
        if len(found) != self.num_shards:
            raise InvalidInputError.at(
                f"data.{self.split}",
                f"gives {len(found)} streams for epoch {epoch} and {self.num_shards} for epoch 0; "
                "their number must stay",
            )
        rows: Iterable[Any] = found[shard]
        return rows


@dataclass(frozen=True, slots=True)
class SingleSource:
    """An object that is iterated from its beginning whenever it is asked: one shard."""

    value: Any
    initial: str | None
    """Its state before it is read, as JSON; None where it has none."""
    num_shards: int = 1

    def open(self, epoch: int, shard: int) -> Iterable[Any]:
        assert shard == 0, shard
        if self.initial is not None:  # one that has gone on from a state would do so again
            self.value.load_state_dict(json.loads(self.initial))
        _set_epoch(self.value, epoch)
        rows: Iterable[Any] = self.value
        return rows


def _set_epoch(rows: Any, epoch: int) -> None:
    if callable(getattr(rows, "set_epoch", None)):
        rows.set_epoch(epoch)


def state_of(rows: Iterable[Any]) -> str | None:
    """Returns the state of what is being read, as JSON; None where it has none that is JSON."""
    state_dict = getattr(rows, "state_dict", None)
    if not (callable(state_dict) and callable(getattr(rows, "load_state_dict", None))):
        return None
    state = state_dict()
    try:
        return None if state is None else json.dumps(state, allow_nan=False)
    except (TypeError, ValueError):
        return None


def opened(source: StreamSource, epoch: int, shard: int, state: str | None) -> Iterable[Any]:
    """Opens a shard, at its first row or where a state of it leads to."""
    rows = source.open(epoch, shard)
    if state is not None:
        rows.load_state_dict(json.loads(state))  # type: ignore[attr-defined]
    return rows


def stream_source(value: Any, split: str) -> StreamSource | None:
    """Returns the source of an object whose rows come one after the other; None for any other."""
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

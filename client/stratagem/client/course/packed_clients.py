"""The clients of a round that is long past, packed: a page keeps those of thousands of rounds.

A number of clients takes a tenth of the memory of its values, and each comes back as it was. What a
list of rounds shows of them (how many are in which state) is known without unpacking.
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, overload

import numpy as np

from stratagem.client.course.client_in_round import ClientInRound, ClientState

_STATES: Final = tuple(ClientState)
_COLUMNS: Final = (
    ("client", "<i8"),
    ("state", "u1"),
    ("worker_id", "<u4"),
    ("loss", "<f8"),
    ("num_samples", "<i8"),
    ("seconds", "<f8"),
    ("sent_bytes", "<i8"),
    ("cause", "<u4"),
    ("staleness", "<i4"),
    ("assigned_s", "<f8"),
    ("answered_s", "<f8"),
)
"""What is stored of each; times that are not known are NaN."""
_ROW_BYTES: Final = sum(np.dtype(dtype).itemsize for _, dtype in _COLUMNS)
_LEVEL: Final = 1
"""Of zlib: others take longer, and save a twentieth."""


class SharedWords:
    """Numbers of words that very many clients share: workers and causes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._words: list[str] = []

    def number(self, word: str) -> int:
        """Return the number of a word, a new one where it has none."""
        if word not in self._numbers:
            self._numbers[word] = len(self._words)
            self._words.append(word)
        return self._numbers[word]

    def word(self, number: int) -> str:
        """Return the word of a number."""
        return self._words[number]


class PackedClients(Sequence[ClientInRound]):
    """The clients of a round in order, each as it was; unpacked when they are looked at."""

    __slots__ = ("_counts", "_names", "_num", "_num_own", "_packed", "num_selected")

    def __init__(
        self, own: Mapping[int, ClientInRound], stale: Sequence[ClientInRound], names: SharedWords
    ) -> None:
        """own: that were selected for the round; stale: of earlier ones, that count in it."""
        clients = (*own.values(), *stale)
        self._names, self._num, self._num_own = names, len(clients), len(own)
        self._counts = tuple(sum(each.state is state for each in clients) for state in _STATES)
        self.num_selected = sum(not each.staleness for each in clients)
        """Those whose update, if any, is of this round."""
        parts = [_shuffled(self._column(name, dtype, clients)) for name, dtype in _COLUMNS]
        reasons = {at: each.reason for at, each in enumerate(clients) if each.reason}
        parts.append(json.dumps(reasons, separators=(",", ":")).encode())
        self._packed = zlib.compress(b"".join(parts), _LEVEL)

    def count(self, state: ClientState) -> int:
        """Return how many clients are in this state."""
        return self._counts[_STATES.index(state)]

    def unpacked(self) -> tuple[dict[int, ClientInRound], tuple[ClientInRound, ...]]:
        """Return those that were selected for the round, by client, and those of earlier ones."""
        clients = self._unpacked()
        own = {each.client: each for each in clients[: self._num_own]}
        return own, tuple(clients[self._num_own :])

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[ClientInRound]:
        return iter(in_order(self._unpacked()))

    @overload
    def __getitem__(self, at: int) -> ClientInRound: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[ClientInRound]: ...
    def __getitem__(self, at: int | slice) -> ClientInRound | Sequence[ClientInRound]:
        return in_order(self._unpacked())[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _column(self, name: str, dtype: str, clients: Iterable[ClientInRound]) -> Any:
        values: Iterable[Any] = (getattr(each, name) for each in clients)
        if name in ("worker_id", "cause"):
            values = map(self._names.number, values)
        elif name == "state":
            values = map(_STATES.index, values)
        elif name in ("assigned_s", "answered_s"):
            values = (np.nan if each is None else each for each in values)
        return np.array(list(values), dtype=dtype)

    def _unpacked(self) -> list[ClientInRound]:
        data = zlib.decompress(self._packed)
        columns: dict[str, list[Any]] = {}
        start = 0
        for name, dtype in _COLUMNS:
            columns[name] = _plain(data, start, self._num, np.dtype(dtype))
            start += self._num * np.dtype(dtype).itemsize
        reasons = json.loads(data[self._num * _ROW_BYTES :])
        columns["state"] = [_STATES[each] for each in columns["state"]]
        for name in ("worker_id", "cause"):
            columns[name] = [self._names.word(each) for each in columns[name]]
        for name in ("loss", "seconds"):  # equal records hold the same NaN
            columns[name] = [math.nan if each != each else each for each in columns[name]]
        for name in ("assigned_s", "answered_s"):
            columns[name] = [None if each != each else each for each in columns[name]]
        columns["reason"] = [reasons.get(str(at), "") for at in range(self._num)]
        rows = zip(*columns.values(), strict=True)
        return [ClientInRound(**dict(zip(columns, row, strict=True))) for row in rows]


def in_order(clients: Iterable[ClientInRound]) -> tuple[ClientInRound, ...]:
    """Return the clients of a round in order of their numbers."""
    return tuple(sorted(clients, key=lambda each: each.client))


def _shuffled(column: Any) -> bytes:
    """Return the first bytes of all values, then the second ones, and so on: equal ones are
    together."""
    return bytes(column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes())


def _plain(data: bytes, start: int, num: int, dtype: "np.dtype[Any]") -> list[Any]:
    raw = np.frombuffer(data, np.uint8, num * dtype.itemsize, start)
    values: list[Any] = (
        np.ascontiguousarray(raw.reshape(dtype.itemsize, num).T).view(dtype).ravel().tolist()
    )
    return values

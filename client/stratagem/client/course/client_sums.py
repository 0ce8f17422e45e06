"""Add up the results of the clients of a federation, round by round."""

import json
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, overload

import numpy as np

# ---- Client in a round ----


class ClientState(StrEnum):
    """The outcome of a client in a round."""

    SELECTED = "selected"
    """It was asked, and has not answered."""
    DONE = "done"
    """Its update counts, or will when the round closes."""
    LATE = "late"
    """The round was closed without it."""
    REJECTED = "rejected"
    EXCUSED = "excused"
    """It could not be asked, or has left the round; it has not failed."""


@dataclass(frozen=True, slots=True)
class ClientInRound:
    """One client in one round."""

    client: int
    state: ClientState
    worker_id: str = ""
    """The worker that trains it; empty while it waits for a worker."""
    loss: float = math.nan
    num_samples: int = 0
    seconds: float = math.nan
    sent_bytes: int = 0
    """The bytes of its update if a codec is used; otherwise 0."""
    cause: str = ""
    """The kind of reason that its update was rejected for, such as "not_finite"."""
    reason: str = ""
    """The reason why it was rejected or excused, as a sentence."""
    staleness: int = 0
    """The number of rounds between the one that the update was trained for and this one."""
    assigned_s: float | None = None
    """The wall time at which it was given to its worker."""
    answered_s: float | None = None
    """The wall time of its update, or of its rejection."""


def mean_loss(clients: Iterable[ClientInRound]) -> float:
    """Return the mean loss of updates, weighted by their samples; NaN of none."""
    known = [(each.num_samples, each.loss) for each in clients if each.num_samples]
    samples = sum(num for num, _ in known)
    return sum(num * loss for num, loss in known) / samples if samples else math.nan


# ---- Sums over rounds ----


@dataclass(frozen=True, slots=True)
class FederatedClient:
    """One client over all rounds."""

    client: int
    worker_id: str
    """The worker that it lives on, or trained on last."""
    tags: tuple[str, ...]
    num_selected: int
    num_done: int
    num_late: int
    num_rejected: int
    causes: Mapping[str, int]
    """The number of rejected updates by cause."""
    state: ClientState | None
    """The state in the newest round that it was selected for; None: it was never selected."""
    reason: str
    """The reason for the last rejection."""
    loss: float
    """The loss of its newest update."""
    num_samples: int
    seconds: float
    """The mean time of its updates; NaN: it has sent none."""
    sent_bytes: int
    """The total bytes of its updates, if a codec is used."""
    benched_until: int | None = None
    """The round from which it may take part again; None: it is not benched."""


@dataclass(slots=True)
class _Sum:
    """One client over the rounds so far."""

    states: Counter[ClientState] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    newest: ClientInRound | None = None
    trained: ClientInRound | None = None
    """The client in the newest round in which it had an update."""
    rejected: ClientInRound | None = None
    worker_id: str = ""
    num_times: int = 0
    seconds: float = 0.0
    sent_bytes: int = 0

    def add(self, client: ClientInRound) -> None:
        self.newest = client
        self.states[client.state] += 1
        self.worker_id = client.worker_id or self.worker_id
        self.sent_bytes += client.sent_bytes
        if client.num_samples:
            self.trained = client
            if not math.isnan(client.seconds):
                self.num_times, self.seconds = self.num_times + 1, self.seconds + client.seconds
        if client.state is ClientState.REJECTED:
            self.rejected = client
            self.causes[client.cause] += 1


class ClientSums:
    """The results of clients, summed up round by round."""

    def __init__(self) -> None:
        self._of: dict[int, _Sum] = {}

    def copy(self) -> "ClientSums":
        """Return a copy that can grow while these sums stay as they are."""
        made = ClientSums()
        made._of = {
            number: replace(of, states=Counter(of.states), causes=Counter(of.causes))
            for number, of in self._of.items()
        }
        return made

    def add(self, clients: Iterable[ClientInRound]) -> None:
        """Add the clients of the next round."""
        for each in clients:
            if not each.staleness:  # stale clients were seen in their own round
                self._of.setdefault(each.client, _Sum()).add(each)

    @property
    def numbers(self) -> Collection[int]:
        """Return the clients that were seen."""
        return self._of.keys()

    def client(self, number: int) -> FederatedClient:
        """Return one client, seen or not, without its tags."""
        of = self._of.get(number, _Sum())
        return FederatedClient(
            client=number,
            worker_id=of.worker_id,
            tags=(),
            num_selected=of.states.total() - of.states[ClientState.EXCUSED],
            num_done=of.states[ClientState.DONE],
            num_late=of.states[ClientState.LATE],
            num_rejected=of.states[ClientState.REJECTED],
            causes=dict(of.causes),
            state=of.newest.state if of.newest else None,
            reason=of.rejected.reason if of.rejected else "",
            loss=of.trained.loss if of.trained else math.nan,
            num_samples=of.trained.num_samples if of.trained else 0,
            seconds=of.seconds / of.num_times if of.num_times else math.nan,
            sent_bytes=of.sent_bytes,
        )


# ---- Packed clients ----
#
# The clients of a past round are packed, since a page keeps those of thousands of rounds.
#
# Packed clients take a tenth of the memory of their values, and each is restored unchanged. The
# counts by state that a list of rounds shows are known without unpacking.

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
"""The columns of a packed client; unknown times are NaN."""
_ROW_BYTES: Final = sum(np.dtype(dtype).itemsize for _, dtype in _COLUMNS)
_LEVEL: Final = 1
"""The compression level of zlib: higher levels take longer and save only 5 %."""


class SharedWords:
    """Numbers for words that many clients share: workers and causes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._words: list[str] = []

    def number(self, word: str) -> int:
        """Return the number of a word, a new one if it has none."""
        if word not in self._numbers:
            self._numbers[word] = len(self._words)
            self._words.append(word)
        return self._numbers[word]

    def word(self, number: int) -> str:
        """Return the word of a number."""
        return self._words[number]


class PackedClients(Sequence[ClientInRound]):
    """The clients of a round in order, packed, and unpacked when they are read."""

    __slots__ = ("_counts", "_names", "_num", "_num_own", "_packed", "num_selected")

    def __init__(
        self, own: Mapping[int, ClientInRound], stale: Sequence[ClientInRound], names: SharedWords
    ) -> None:
        """Pack clients. own: those selected for the round; stale: those of earlier rounds that
        count in it."""
        clients = (*own.values(), *stale)
        self._names, self._num, self._num_own = names, len(clients), len(own)
        self._counts = tuple(sum(each.state is state for each in clients) for state in _STATES)
        self.num_selected = sum(not each.staleness for each in clients)
        """The number of clients that were selected for this round."""
        parts = [_shuffled(self._column(name, dtype, clients)) for name, dtype in _COLUMNS]
        reasons = {at: each.reason for at, each in enumerate(clients) if each.reason}
        parts.append(json.dumps(reasons, separators=(",", ":")).encode())
        self._packed = zlib.compress(b"".join(parts), _LEVEL)

    def count(self, state: ClientState) -> int:
        """Return how many clients are in this state."""
        return self._counts[_STATES.index(state)]

    def unpacked(self) -> tuple[dict[int, ClientInRound], tuple[ClientInRound, ...]]:
        """Return the clients that were selected for the round, by number, and those of earlier
        rounds."""
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
    """Return the first bytes of all values, then the second ones, and so on, so that equal bytes
    are neighbours."""
    return bytes(column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes())


def _plain(data: bytes, start: int, num: int, dtype: "np.dtype[Any]") -> list[Any]:
    raw = np.frombuffer(data, np.uint8, num * dtype.itemsize, start)
    values: list[Any] = (
        np.ascontiguousarray(raw.reshape(dtype.itemsize, num).T).view(dtype).ravel().tolist()
    )
    return values

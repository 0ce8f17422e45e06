"""Aggregate the results of a federation's clients over its rounds, in packed form."""

import json
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, overload

if TYPE_CHECKING:
    import numpy as np

# ---- Client in a round ----


class ClientState(StrEnum):
    """The state of a client in one round."""

    SELECTED = "selected"
    """The client was selected, and has not answered yet."""
    DONE = "done"
    """The client's update was received, and counts once the round closes."""
    LATE = "late"
    """The round was closed without the client's update."""
    REJECTED = "rejected"
    EXCUSED = "excused"
    """The client could not be asked, or has left; this does not count as its failure."""


@dataclass(frozen=True, slots=True)
class ClientInRound:
    """The record of one client in one round."""

    client: int
    state: ClientState
    worker_id: str = ""
    """The worker that trains the client; empty while none is assigned."""
    loss: float = math.nan
    num_samples: int = 0
    seconds: float = math.nan
    sent_bytes: int = 0
    """The encoded size of the client's update if it was compressed by a codec; otherwise 0."""
    cause: str = ""
    """The category of the reason for a rejection, such as "not_finite"."""
    reason: str = ""
    """The reason for the rejection or excuse, as a sentence."""
    staleness: int = 0
    """The number of rounds after its own in which the client's update counts; 0 if in its own."""
    assigned_s: float | None = None
    """The wall time at which the client was assigned to its worker."""
    answered_s: float | None = None
    """The wall time at which the client's update was received or rejected."""


def mean_loss(clients: Iterable[ClientInRound]) -> float:
    """Return the sample-weighted mean loss of the updates; NaN if there are none."""
    updates = [(client.num_samples, client.loss) for client in clients if client.num_samples]
    samples = sum(num for num, _ in updates)
    return sum(num * loss for num, loss in updates) / samples if samples else math.nan


# ---- Sums over rounds ----


@dataclass(frozen=True, slots=True)
class FederatedClient:
    """The summary of one client over all rounds."""

    client: int
    worker_id: str
    """The worker that the client is bound to, or that trained it last."""
    tags: tuple[str, ...]
    num_selected: int
    num_done: int
    num_late: int
    num_rejected: int
    causes: Mapping[str, int]
    """The number of rejected updates, keyed by cause."""
    state: ClientState | None
    """The client's state in the newest round that selected it; None if none did."""
    reason: str
    """The reason for the client's last rejection."""
    loss: float
    """The loss of the client's newest update."""
    num_samples: int
    seconds: float
    """The mean time from a client's assignment to its update; NaN if it has sent none."""
    sent_bytes: int
    """The total encoded size of the client's updates, if a codec compresses them."""
    benched_until: int | None = None
    """The first round in which the client may take part again; None if it is not benched."""


@dataclass(slots=True)
class _Sum:
    """The running totals of one client over the rounds so far."""

    states: Counter[ClientState] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    newest: ClientInRound | None = None
    trained: ClientInRound | None = None
    """The client's record in the newest round that received an update from it."""
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
    """The running totals of all clients, updated round by round."""

    def __init__(self) -> None:
        self._of: dict[int, _Sum] = {}

    def copy(self) -> "ClientSums":
        """Return an independent copy, which can be updated further."""
        made = ClientSums()
        made._of = {
            number: replace(of, states=Counter(of.states), causes=Counter(of.causes))
            for number, of in self._of.items()
        }
        return made

    def add(self, clients: Iterable[ClientInRound]) -> None:
        """Add the clients of the next round."""
        for client in clients:
            if not client.staleness:  # stale clients were seen in their own round
                self._of.setdefault(client.client, _Sum()).add(client)

    @property
    def numbers(self) -> Collection[int]:
        """Return the client numbers of all clients that a round has selected so far."""
        return self._of.keys()

    def client(self, number: int) -> FederatedClient:
        """Return the summary of a client, without its tags; empty if it was never selected."""
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
"""The columns of the packed records; unknown times are NaN."""
_ROW_BYTES: Final = sum(int(dtype[-1]) for _, dtype in _COLUMNS)
_LEVEL: Final = 1
"""The zlib compression level: higher levels take longer and save only 5 %."""


class SharedWords:
    """A two-way index from strings that many clients share (workers, causes) to small numbers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._words: list[str] = []

    def number(self, word: str) -> int:
        """Return the number of a string; assign a new one if it has none."""
        if word not in self._numbers:
            self._numbers[word] = len(self._words)
            self._words.append(word)
        return self._numbers[word]

    def word(self, number: int) -> str:
        """Return the string with this number."""
        return self._words[number]


class PackedClients(Sequence[ClientInRound]):
    """A compressed sequence of the client records of one round, unpacked when read."""

    __slots__ = ("_counts", "_names", "_num", "_num_own", "_packed", "num_selected")

    def __init__(
        self,
        chosen: Mapping[int, ClientInRound],
        stale: Sequence[ClientInRound],
        names: SharedWords,
    ) -> None:
        """Pack the records of a round. chosen: records of the clients selected for it; stale:
        records of earlier rounds' late updates that count in it."""
        clients = (*chosen.values(), *stale)
        self._names, self._num, self._num_own = names, len(clients), len(chosen)
        self._counts = tuple(sum(client.state is state for client in clients) for state in _STATES)
        self.num_selected = sum(not client.staleness for client in clients)
        """The number of clients selected for this round."""
        parts = [_shuffled(self._column(name, dtype, clients)) for name, dtype in _COLUMNS]
        reasons = {at: client.reason for at, client in enumerate(clients) if client.reason}
        parts.append(json.dumps(reasons, separators=(",", ":")).encode())
        self._packed = zlib.compress(b"".join(parts), _LEVEL)

    def count(self, state: ClientState) -> int:
        """Return the number of clients in this state."""
        return self._counts[_STATES.index(state)]

    def unpacked(self) -> tuple[dict[int, ClientInRound], tuple[ClientInRound, ...]]:
        """Return the records of clients selected for the round, keyed by number, and those of late
        updates from earlier rounds."""
        clients = self._unpacked()
        chosen = {client.client: client for client in clients[: self._num_own]}
        return chosen, tuple(clients[self._num_own :])

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
        import numpy as np

        values: Iterable[Any] = (getattr(client, name) for client in clients)
        if name in ("worker_id", "cause"):
            values = map(self._names.number, values)
        elif name == "state":
            values = map(_STATES.index, values)
        elif name in ("assigned_s", "answered_s"):
            values = (np.nan if time_s is None else time_s for time_s in values)
        return np.array(list(values), dtype=dtype)

    def _unpacked(self) -> list[ClientInRound]:
        import numpy as np

        data = zlib.decompress(self._packed)
        columns: dict[str, list[Any]] = {}
        start = 0
        for name, dtype in _COLUMNS:
            columns[name] = _plain(data, start, self._num, np.dtype(dtype))
            start += self._num * np.dtype(dtype).itemsize
        reasons = json.loads(data[self._num * _ROW_BYTES :])
        columns["state"] = [_STATES[number] for number in columns["state"]]
        for name in ("worker_id", "cause"):
            columns[name] = [self._names.word(number) for number in columns[name]]
        for name in ("loss", "seconds"):  # equal records hold the same NaN
            columns[name] = [math.nan if value != value else value for value in columns[name]]
        for name in ("assigned_s", "answered_s"):
            columns[name] = [None if value != value else value for value in columns[name]]
        columns["reason"] = [reasons.get(str(at), "") for at in range(self._num)]
        rows = zip(*columns.values(), strict=True)
        return [ClientInRound(**dict(zip(columns, row, strict=True))) for row in rows]


def in_order(clients: Iterable[ClientInRound]) -> tuple[ClientInRound, ...]:
    """Return the records sorted by client number."""
    return tuple(sorted(clients, key=lambda client: client.client))


def _shuffled(column: Any) -> bytes:
    """Transpose the values of a column into byte planes (all first bytes, then all second ones,
    ...), which compress better."""
    import numpy as np

    return bytes(column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes())


def _plain(data: bytes, start: int, num: int, dtype: "np.dtype[Any]") -> list[Any]:
    import numpy as np

    raw = np.frombuffer(data, np.uint8, num * dtype.itemsize, start)
    values: list[Any] = (
        np.ascontiguousarray(raw.reshape(dtype.itemsize, num).T).view(dtype).ravel().tolist()
    )
    return values

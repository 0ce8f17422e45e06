"""What is known of the clients of a federation over many rounds, added up round by round."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from stratagem.client.course.client_in_round import ClientInRound, ClientState


@dataclass(frozen=True, slots=True)
class FederatedClient:
    """One client over all rounds."""

    client: int
    worker_id: str
    """Where it lives, or where it trained last."""
    tags: tuple[str, ...]
    num_selected: int
    num_done: int
    num_late: int
    num_rejected: int
    causes: Mapping[str, int]
    """How often its updates were rejected, by cause."""
    state: ClientState | None
    """In the newest round that it was selected for; None: in none so far."""
    reason: str
    """Why it was rejected last."""
    loss: float
    """Of its newest update."""
    num_samples: int
    seconds: float
    """That its updates took, in the mean; NaN: it has sent none."""
    sent_bytes: int
    """In all, with a codec."""
    benched_until: int | None = None
    """The round from which on it may take part again; None: it sits on no bench."""


@dataclass(slots=True)
class _Sum:
    """One client over the rounds so far."""

    states: Counter[ClientState] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    newest: ClientInRound | None = None
    trained: ClientInRound | None = None
    """As it was in the newest round in which it had an update."""
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
    """The clients of rounds, which are added one after another."""

    def __init__(self) -> None:
        self._of: dict[int, _Sum] = {}

    def copy(self) -> "ClientSums":
        """Return sums to which more can be added, while these stay as they are."""
        made = ClientSums()
        made._of = {
            number: replace(of, states=Counter(of.states), causes=Counter(of.causes))
            for number, of in self._of.items()
        }
        return made

    def add(self, clients: Iterable[ClientInRound]) -> None:
        """Take in the clients of the next round."""
        for each in clients:
            if not each.staleness:  # which was seen in its own round
                self._of.setdefault(each.client, _Sum()).add(each)

    @property
    def numbers(self) -> Collection[int]:
        """Return the clients that were seen."""
        return self._of.keys()

    def client(self, number: int) -> FederatedClient:
        """Return one client, whether or not it was seen; its tags are not known here."""
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

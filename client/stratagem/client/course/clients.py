"""The clients of a federated run over all its rounds."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stratagem.client.course.payloads import party_of
from stratagem.client.course.rounds import ClientInRound, ClientState, Round, RoundsFolding
from stratagem.client.course.shapes import EventLike


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


def clients(events: Iterable[EventLike], party: str = "") -> tuple[FederatedClient, ...]:
    """Return the clients of a federation, in order; empty for other runs."""
    folding, roster = RoundsFolding(party), dict[int, Home]()
    for event in events:
        folding.fold(event)
        if event.kind in ROSTER_KINDS and party_of(event) == party:
            roster |= homes(event)
    return of_rounds(folding.rounds, roster)


ROSTER_KINDS: Final = ("RosterFormed", "ClientsJoined")
Home = tuple[str, tuple[str, ...]]
"""The worker that a client lives on, and its tags."""


def homes(event: EventLike) -> dict[int, Home]:
    """Return the clients that a fact of ROSTER_KINDS names."""
    listed = event.payload["clients"]
    return {each["client"]: (each["worker_id"], tuple(each.get("tags", ()))) for each in listed}


def of_rounds(found: Sequence[Round], roster: Mapping[int, Home]) -> tuple[FederatedClient, ...]:
    """Return the clients of these rounds and of a roster."""
    seen: dict[int, list[ClientInRound]] = {client: [] for client in roster}
    for each in found:
        for client in each.clients:
            if not client.staleness:  # which was seen in its own round
                seen.setdefault(client.client, []).append(client)
    return tuple(_client(number, seen[number], roster.get(number)) for number in sorted(seen))


def _client(number: int, seen: Sequence[ClientInRound], home: Home | None) -> FederatedClient:
    states = Counter(each.state for each in seen)
    trained = [each for each in seen if each.num_samples]
    rejected = [each for each in seen if each.state is ClientState.REJECTED]
    latest = trained[-1] if trained else None
    worker = next((each.worker_id for each in reversed(seen) if each.worker_id), "")
    times = [each.seconds for each in trained if not math.isnan(each.seconds)]
    return FederatedClient(
        client=number,
        worker_id=home[0] if home else worker,
        tags=home[1] if home else (),
        num_selected=len(seen) - states[ClientState.EXCUSED],
        num_done=states[ClientState.DONE],
        num_late=states[ClientState.LATE],
        num_rejected=states[ClientState.REJECTED],
        causes=dict(Counter(each.cause for each in rejected)),
        state=seen[-1].state if seen else None,
        reason=rejected[-1].reason if rejected else "",
        loss=latest.loss if latest else math.nan,
        num_samples=latest.num_samples if latest else 0,
        seconds=sum(times) / len(times) if times else math.nan,
        sent_bytes=sum(each.sent_bytes for each in seen),
    )

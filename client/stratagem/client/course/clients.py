"""The clients of a federated run over all its rounds."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from stratagem.client.course.payloads import party_of, undone_from
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
    benched_until: int | None = None
    """The round from which on it may take part again; None: it sits on no bench."""


def clients(events: Iterable[EventLike], party: str = "") -> tuple[FederatedClient, ...]:
    """Return the clients of a federation, in order; empty for other runs."""
    folding, roster, benches = RoundsFolding(party), dict[int, Home](), dict[int, int]()
    for event in events:
        folding.fold(event)
        fold_benches(benches, event, party)
        if event.kind in ROSTER_KINDS and party_of(event) == party:
            roster |= homes(event)
    return of_rounds(folding.rounds, roster, benches)


ROSTER_KINDS: Final = ("RosterFormed", "ClientsJoined")
Home = tuple[str, tuple[str, ...]]
"""The worker that a client lives on, and its tags."""


def homes(event: EventLike) -> dict[int, Home]:
    """Return the clients that a fact of ROSTER_KINDS names."""
    listed = event.payload["clients"]
    return {each["client"]: (each["worker_id"], tuple(each.get("tags", ()))) for each in listed}


def fold_benches(benches: dict[int, int], event: EventLike, party: str) -> None:
    """Take the next event into the first round in which a benched client may take part, by client.
    Who goes back to an earlier commit forgets benches."""
    if undone_from(event) is not None:
        benches.clear()
    elif event.kind == "ClientBenched" and party_of(event) == party:
        benches[event.payload["client"]] = event.payload["until_round"]


def of_rounds(
    found: Sequence[Round],
    roster: Mapping[int, Home],
    benches: Mapping[int, int] = MappingProxyType({}),
) -> tuple[FederatedClient, ...]:
    """Return the clients of these rounds and of a roster. benches: as `fold_benches` has it."""
    newest = found[-1].number if found else 0
    sitting = {client: until for client, until in benches.items() if until > newest}
    seen: dict[int, list[ClientInRound]] = {client: [] for client in roster}
    for each in found:
        for client in each.clients:
            if not client.staleness:  # which was seen in its own round
                seen.setdefault(client.client, []).append(client)
    return tuple(
        replace(_client(each, seen[each], roster.get(each)), benched_until=sitting.get(each))
        for each in sorted(seen)
    )


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

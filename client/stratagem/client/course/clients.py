"""The clients of a federated run over all its rounds."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from stratagem.client.course.client_sums import ClientSums, FederatedClient
from stratagem.client.course.payloads import party_of, undone_from
from stratagem.client.course.rounds import RoundsFolding
from stratagem.client.course.shapes import EventLike


def clients(events: Iterable[EventLike], party: str = "") -> tuple[FederatedClient, ...]:
    """Return the clients of a federation, in order; empty for other runs."""
    folding, roster, benches = RoundsFolding(party), dict[int, Home](), dict[int, int]()
    for event in events:
        folding.fold(event)
        fold_benches(benches, event, party)
        if event.kind in ROSTER_KINDS and party_of(event) == party:
            roster |= homes(event)
    return of_sums(folding.sums, folding.number, roster, benches)


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


def of_sums(
    sums: ClientSums,
    newest: int,
    roster: Mapping[int, Home],
    benches: Mapping[int, int] = MappingProxyType({}),
) -> tuple[FederatedClient, ...]:
    """Return the clients of rounds up to the newest, and of a roster. benches: as `fold_benches`
    has it."""
    return tuple(
        _at_home(sums.client(each), roster.get(each), benches.get(each, 0), newest)
        for each in sorted(roster.keys() | sums.numbers)
    )


def _at_home(
    client: FederatedClient, home: Home | None, until: int, newest: int
) -> FederatedClient:
    """Return a client with where it lives, and the round until which it sits on a bench."""
    worker_id, tags = (client.worker_id, ()) if home is None else home
    benched_until = until if until > newest else None
    return replace(client, worker_id=worker_id, tags=tags, benched_until=benched_until)

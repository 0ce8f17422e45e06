"""The rounds of a federated run: who was asked, who answered, who came late, and with what loss."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from stratagem.client.course.payloads import kept, number, numbers, party_of
from stratagem.client.course.shapes import EventLike


class ClientState(StrEnum):
    """What has become of a client in a round."""

    SELECTED = "selected"
    """It was asked, and has not answered."""
    DONE = "done"
    """Its update counts, or will when the round closes."""
    LATE = "late"
    """The round was closed without it."""
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class ClientInRound:
    """One client in one round."""

    client: int
    state: ClientState
    worker_id: str = ""
    """Where it trains; empty while it waits for a worker."""
    loss: float = math.nan
    num_samples: int = 0
    seconds: float = math.nan
    sent_bytes: int = 0
    """With a codec; 0 without."""
    cause: str = ""
    """Of a rejected update: one of few words, such as "not_finite"."""
    reason: str = ""
    """Why it was rejected, as a sentence."""
    staleness: int = 0
    """How many rounds before this one the update was trained for."""
    assigned_s: float | None = None
    """Wall time at which it was given to its worker."""
    answered_s: float | None = None
    """Wall time of its update, or of its rejection."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a federation."""

    number: int
    began_s: float
    """Wall time of the selection."""
    clients: tuple[ClientInRound, ...]
    """In order of client. An update of an earlier round that counts here has its staleness."""
    num_needed: int | None = None
    """The round closes with the first updates of this number; None: it waits for all."""
    deadline_s: float | None = None
    """Seconds after the selection at which it closes; None: it has no deadline."""
    seconds: float | None = None
    """From the selection to the close; None: it is open."""
    loss: float = math.nan
    """Of the updates that count: sum of samples times loss, by the sum of samples."""
    reason: str = ""
    """Why it was closed, as a sentence."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of its commit and its evaluation, as far as there are any."""

    def with_state(self, state: ClientState) -> tuple[ClientInRound, ...]:
        """Return the clients in this state."""
        return tuple(client for client in self.clients if client.state is state)


def rounds(events: Iterable[EventLike], party: str = "") -> tuple[Round, ...]:
    """Return the rounds of a federation, the one of this path, in order; empty for other runs.

    What a resumption from an earlier commit has undone is left out.
    """
    found: list[Round] = []
    for event in events:
        found = kept(found, event, lambda each: each.number)
        if party_of(event) == party:
            _fold(found, event)
    return tuple(found)


def _fold(found: list[Round], event: EventLike) -> None:
    fact = event.payload
    match event.kind:
        case "ClientsSelected":
            _select(found, event)
        case "ClientsAssigned":
            for each in fact["assignments"]:
                member = each["member"] or {}
                changes = {"worker_id": str(member.get("worker_id", ""))}
                _change(found, fact, each["client"], assigned_s=event.time_s, **changes)
        case "UpdateReceived":
            _change(
                *(found, fact, fact["client"]),
                state=ClientState.DONE,
                loss=number(fact["loss"]),
                num_samples=fact["num_samples"],
                seconds=number(fact["seconds"]),
                sent_bytes=(fact.get("traffic") or {}).get("sent_bytes", 0),
                answered_s=event.time_s,
                cause="",
                reason="",
            )
        case "UpdateRejected":
            state, cause = ClientState.REJECTED, str(fact.get("cause", "unknown"))
            why = {"cause": cause, "reason": str(fact["reason"])}
            _change(found, fact, fact["client"], state=state, answered_s=event.time_s, **why)
        case "RoundWaits":
            for client in fact.get("asked_again", ()):
                _change(found, fact, client, state=ClientState.SELECTED)
        case "RoundClosed":
            _close(found, event)
        case "SegmentCommitted" | "Evaluated":
            _place(found, fact["segment"], metrics=numbers(fact.get("metrics")))


def _select(found: list[Round], event: EventLike) -> None:
    fact = event.payload
    clients = tuple(ClientInRound(each, ClientState.SELECTED) for each in sorted(fact["clients"]))
    begun = Round(
        number=fact["round_num"],
        began_s=event.time_s,
        clients=clients,
        num_needed=fact.get("num_needed"),
        deadline_s=_deadline(event),
    )
    found[:] = [each for each in found if each.number < begun.number] + [begun]


def _deadline(event: EventLike) -> float | None:
    """Return how long after its selection a round closes, if it has a deadline and a coordinator of
    this version tells the time by the same clock."""
    deadline_s, leader_s = event.payload.get("deadline_s"), getattr(event, "leader_s", 0.0)
    return deadline_s - leader_s if deadline_s is not None and leader_s else None


def _change(found: list[Round], fact: Mapping[str, Any], client: int, **changes: Any) -> None:
    """Change what is known of a client in the round that the fact names."""
    at = _index(found, fact["round_num"])
    if at is None:
        return
    closed = found[at].seconds is not None
    if closed and changes.get("state") is ClientState.DONE:  # it came after the close
        changes["state"] = ClientState.LATE
    clients = tuple(
        replace(each, **changes) if each.client == client else each for each in found[at].clients
    )
    found[at] = replace(found[at], clients=clients)


def _close(found: list[Round], event: EventLike) -> None:
    fact = event.payload
    at = _index(found, fact["round_num"])
    if at is None:
        return
    accepted = {each["client"]: each for each in fact["accepted"]}
    clients = tuple(_closed(each, accepted.get(each.client)) for each in found[at].clients)
    own = {each.client for each in clients}
    stale = [_stale(found, number, each) for number, each in accepted.items() if number not in own]
    counted = [each for each in (*clients, *stale) if each.state is ClientState.DONE]
    found[at] = replace(
        found[at],
        clients=tuple(sorted((*clients, *stale), key=lambda each: each.client)),
        seconds=event.time_s - found[at].began_s,
        loss=mean_loss(counted),
        reason=str(fact["reason"]),
        metrics=numbers(fact.get("metrics")),
    )


def _closed(client: ClientInRound, accepted: Mapping[str, Any] | None) -> ClientInRound:
    """Return the client as the close leaves it."""
    if accepted is not None:
        staleness = accepted.get("staleness", 0)
        return replace(client, state=ClientState.DONE, staleness=staleness)
    if client.state is ClientState.REJECTED:
        return client
    return replace(client, state=ClientState.LATE)


def _stale(found: Sequence[Round], client: int, accepted: Mapping[str, Any]) -> ClientInRound:
    """Return a client of an earlier round, whose update counts in the newest one."""
    staleness = accepted.get("staleness", 0)
    earlier = _index(found, found[-1].number - staleness)
    known = () if earlier is None else found[earlier].clients
    trained = next((each for each in known if each.client == client), None)
    trained = trained or ClientInRound(client, ClientState.DONE)
    samples = accepted["num_samples"]
    return replace(trained, state=ClientState.DONE, staleness=staleness, num_samples=samples)


def mean_loss(clients: Iterable[ClientInRound]) -> float:
    """Return the mean loss of updates, weighted by their samples; NaN of none."""
    known = [(each.num_samples, each.loss) for each in clients if each.num_samples]
    samples = sum(num for num, _ in known)
    return sum(num * loss for num, loss in known) / samples if samples else math.nan


def _place(found: list[Round], number: int, *, metrics: Mapping[str, float]) -> None:
    at = _index(found, number)
    if at is not None:
        found[at] = replace(found[at], metrics={**found[at].metrics, **metrics})


def _index(found: Sequence[Round], number: int) -> int | None:
    """Return where the round of a number is, if it is known: rounds follow each other."""
    at = number - found[0].number if found else -1
    return at if 0 <= at < len(found) and found[at].number == number else None

"""Derive the rounds of a federated run from its events: clients, outcomes and losses."""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

from stratagem.client.course.client_sums import (
    ClientInRound,
    ClientState,
    ClientSums,
    FederatedClient,
    PackedClients,
    SharedWords,
    in_order,
    mean_loss,
)
from stratagem.client.course.views import Event, number, numbers, party_of, undone_from

# ---- Clients ----
#
# Clients are followed over all rounds of the run.


def clients(events: Iterable[Event], party: str = "") -> tuple[FederatedClient, ...]:
    """Return the summaries of a federation's clients, sorted by number; empty for other runs."""
    folding, roster, benches = RoundsFolding(party), dict[int, Home](), dict[int, int]()
    for event in events:
        folding.fold(event)
        fold_benches(benches, event, party)
        if event.kind in ROSTER_KINDS and party_of(event) == party:
            roster |= homes(event)
    return of_sums(folding.sums, folding.number, roster, benches)


ROSTER_KINDS: Final = ("RosterFormed", "ClientsJoined")
Home = tuple[str, tuple[str, ...]]
"""The worker that a client is bound to, and the client's tags."""


def homes(event: Event) -> dict[int, Home]:
    """Return each client's worker and tags, keyed by client, from an event of ROSTER_KINDS."""
    listed = event.payload["clients"]
    return {entry["client"]: (entry["worker_id"], tuple(entry.get("tags", ()))) for entry in listed}


def fold_benches(benches: dict[int, int], event: Event, party: str) -> None:
    """Update, by an event, the dictionary from each benched client to the first round in which it
    may take part again. A return to an earlier commit clears it."""
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
    """Return the summaries of all clients that are in the sums or in the roster. newest: the number
    of the newest round. benches: as updated by `fold_benches`."""
    return tuple(
        _at_home(sums.client(client), roster.get(client), benches.get(client, 0), newest)
        for client in sorted(roster.keys() | sums.numbers)
    )


def _at_home(
    client: FederatedClient, home: Home | None, until: int, newest: int
) -> FederatedClient:
    """Complete a client's summary by its worker and tags, and by the end of its bench, `until`, if
    that is after the newest round."""
    worker_id, tags = (client.worker_id, ()) if home is None else home
    benched_until = until if until > newest else None
    return replace(client, worker_id=worker_id, tags=tags, benched_until=benched_until)


# ---- Rounds ----

TRAIN_LOSS: Final = "train.loss"
KEPT_WHOLE: Final = 64
"""The number of newest rounds whose clients are not packed, because late events may change them."""
OUTSIDE_WINDOW: Final = "outside_window"
"""The recorded cause if a client refuses because it takes part only at other hours."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a federation, derived from events."""

    number: int
    began_s: float
    """The wall time at which clients were selected."""
    clients: Sequence[ClientInRound]
    """The clients' records, sorted by number; late updates of earlier rounds have a staleness."""
    num_needed: int | None = None
    """The number of updates at which the round closes; None if it waits for all of them."""
    deadline_s: float | None = None
    """The time from the selection of clients to the deadline; None if there is no deadline."""
    seconds: float | None = None
    """The time from the selection of clients to the close; None while the round is open."""
    loss: float = math.nan
    """The sample-weighted mean loss of the updates that count."""
    told_loss: float | None = None
    """The loss that the coordinator reported; None if the round is open or the coordinator old."""
    reason: str = ""
    """The reason why the round closed, as a sentence."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the round's commit and evaluation, if any."""

    @property
    def is_open(self) -> bool:
        """Return whether updates can still be added to the round."""
        return self.seconds is None

    @property
    def loss_so_far(self) -> float | None:
        """Return the loss that the coordinator reported, else the mean over the updates so far;
        None without updates."""
        if self.told_loss is not None:
            return self.told_loss
        done = self.with_state(ClientState.DONE)
        return mean_loss(done) if any(client.num_samples for client in done) else None

    @property
    def num_selected(self) -> int:
        """Return the number of clients selected for this round, without those of late updates."""
        if isinstance(self.clients, PackedClients):
            return self.clients.num_selected
        return sum(not client.staleness for client in self.clients)

    def count(self, state: ClientState) -> int:
        """Return the number of the round's clients in this state."""
        if isinstance(self.clients, PackedClients):
            return self.clients.count(state)
        return len(self.with_state(state))

    def with_state(self, state: ClientState) -> tuple[ClientInRound, ...]:
        """Return the records of the clients in this state."""
        return tuple(client for client in self.clients if client.state is state)


def rounds(events: Iterable[Event], party: str = "") -> tuple[Round, ...]:
    """Return the rounds of the federation at this party path, in order; empty for other runs.

    Rounds that a resumption from an earlier commit has undone are left out.
    """
    folding = RoundsFolding(party)
    for event in events:
        folding.fold(event)
    return tuple(replace(round_, clients=tuple(round_.clients)) for round_ in folding.rounds)


class RoundsFolding:
    """An incremental reader of a run's events that builds the rounds of one federation."""

    def __init__(self, party: str = "", most: int | None = None) -> None:
        """Begin without rounds. party: the path of the federation. most: how many of the newest
        rounds to keep, by default all."""
        self._party, self._most = party, most
        self._rounds: list[Round] = []
        """The rounds; their `clients` are brought up to date only when they are read."""
        self._chosen: list[dict[int, ClientInRound]] = []
        """The records of the clients selected for each round."""
        self._stale: list[tuple[ClientInRound, ...]] = []
        """The records of earlier rounds' late updates that count in each round."""
        self._changed: set[int] = set()
        """The indices of rounds in `_rounds` whose `clients` are not up to date."""
        self._num_packed, self._names = 0, SharedWords()
        """The number of oldest rounds that are only kept packed; the words that they share."""
        self._sums, self._times, self._are_sums_due = ClientSums(), array("d"), False
        """The totals and durations of the packed rounds; whether these must be computed again."""

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Return the rounds so far."""
        for at in self._changed:
            self._refresh(at)
        self._changed.clear()
        return tuple(self._rounds)

    @property
    def sums(self) -> ClientSums:
        """Return the totals of all clients over all rounds, without unpacking old rounds again."""
        self._sum_up()
        sums = self._sums.copy()
        for round_ in self.rounds[self._num_packed :]:
            sums.add(round_.clients)
        return sums

    @property
    def times(self) -> Sequence[float]:
        """Return the durations of all updates; late ones are in the round in which they count."""
        self._sum_up()
        newest = (_times(round_.clients) for round_ in self.rounds[self._num_packed :])
        return self._times + array("d", chain.from_iterable(newest))

    def _sum_up(self) -> None:
        """Recompute the totals of the packed rounds if one of these rounds has changed."""
        if self._are_sums_due:
            self._sums, self._times, self._are_sums_due = ClientSums(), array("d"), False
            for round_ in self._rounds[: self._num_packed]:
                self._take_in(round_.clients)

    def _take_in(self, clients: Iterable[ClientInRound]) -> None:
        records = tuple(clients)
        self._sums.add(records)
        self._times.extend(_times(records))

    @property
    def number(self) -> int:
        """Return the number of the newest round; 0 before there is one."""
        return self._rounds[-1].number if self._rounds else 0

    @property
    def newest(self) -> Round | None:
        """Return the newest round, open or closed; None if there is none."""
        last = len(self._rounds) - 1
        if last in self._changed:
            self._refresh(last)
            self._changed.remove(last)
        return self._rounds[last] if self._rounds else None

    def _refresh(self, at: int) -> None:
        clients = in_order((*self._chosen[at].values(), *self._stale[at]))
        self._rounds[at] = replace(self._rounds[at], clients=clients)

    def _pack(self) -> None:
        """Pack the clients of all but the KEPT_WHOLE newest rounds."""
        while self._num_packed < len(self._rounds) - KEPT_WHOLE:
            at = self._num_packed
            self._take_in(in_order((*self._chosen[at].values(), *self._stale[at])))
            self._num_packed += 1
            self._put(at, self._chosen[at], self._stale[at])

    def _clients(self, at: int) -> tuple[dict[int, ClientInRound], tuple[ClientInRound, ...]]:
        """Return the records of a round's selected clients, and of the late updates in it."""
        clients = self._rounds[at].clients
        if isinstance(clients, PackedClients):
            return clients.unpacked()
        return self._chosen[at], self._stale[at]

    def _put(
        self, at: int, chosen: dict[int, ClientInRound], stale: tuple[ClientInRound, ...]
    ) -> None:
        """Store the clients' records of a round, packed if the round is old."""
        if at < self._num_packed:
            packed = PackedClients(chosen, stale, self._names)
            self._rounds[at] = replace(self._rounds[at], clients=packed)
            self._chosen[at], self._stale[at] = {}, ()
            self._changed.discard(at)
        else:
            self._chosen[at], self._stale[at] = chosen, stale
            self._changed.add(at)

    def fold(self, event: Event) -> None:
        """Process the next event of the run."""
        last = undone_from(event)
        if last is not None:
            self._keep(sum(round_.number <= last for round_ in self._rounds))
        if event.kind in _KINDS and party_of(event) == self._party:
            if event.kind == "ClientLeft":
                self._leave(event.payload)
            else:
                self._take(event, event.payload)

    def _leave(self, fact: Mapping[str, Any]) -> None:
        """Mark a client that has left as excused if the newest round still waits for its update."""
        at = self._place(self.number)
        record = None if at is None else self._clients(at)[0].get(fact["client"])
        if record is not None and record.state is ClientState.SELECTED:
            why = {"state": ClientState.EXCUSED, "reason": str(fact["reason"])}
            self._change({"round_num": self.number}, record.client, **why)

    def _take(self, event: Event, fact: Mapping[str, Any]) -> None:
        match event.kind:
            case "ClientsSelected":
                self._select(event)
            case "ClientsAssigned":
                for assignment in fact["assignments"]:
                    member = assignment["member"] or {}
                    changes = {"worker_id": str(member.get("worker_id", ""))}
                    self._change(fact, assignment["client"], assigned_s=event.time_s, **changes)
            case "UpdateReceived":
                self._change(
                    *(fact, fact["client"]),
                    state=ClientState.DONE,
                    loss=number(fact["loss"]),
                    num_samples=fact["num_samples"],
                    seconds=number(fact["seconds"]) or math.nan,  # A silo reports none.
                    sent_bytes=(fact.get("traffic") or {}).get("sent_bytes", 0),
                    answered_s=event.time_s,
                    cause="",
                    reason="",
                )
            case "UpdateRejected":
                state, cause = ClientState.REJECTED, str(fact.get("cause", "unknown"))
                if cause == OUTSIDE_WINDOW:
                    state = ClientState.EXCUSED
                why = {"cause": cause, "reason": str(fact["reason"])}
                self._change(fact, fact["client"], state=state, answered_s=event.time_s, **why)
            case "RoundWaits":
                for client in fact.get("asked_again", ()):
                    self._change(fact, client, state=ClientState.SELECTED)
            case "RoundClosed":
                self._close(event)
            case "SegmentCommitted" | "Evaluated":
                at = self._place(fact["segment"])
                if at is not None:
                    metrics = {**self._rounds[at].metrics, **numbers(fact.get("metrics"))}
                    self._rounds[at] = replace(self._rounds[at], metrics=metrics)

    def _keep(self, count: int) -> None:
        """Drop all rounds but the first `count`."""
        del self._rounds[count:], self._chosen[count:], self._stale[count:]
        self._changed = {at for at in self._changed if at < count}
        if count < self._num_packed:
            self._num_packed, self._are_sums_due = count, True

    def _select(self, event: Event) -> None:
        fact = event.payload
        begun = Round(
            number=fact["round_num"],
            began_s=event.time_s,
            clients=(),
            num_needed=fact.get("num_needed"),
            deadline_s=_deadline(event),
        )
        is_known = self.number == begun.number and self._rounds[-1].is_open
        chosen = self._clients(len(self._rounds) - 1)[0] if is_known else {}
        if chosen:  # the open round gets further clients
            begun = replace(begun, began_s=self._rounds[-1].began_s)
        clients = {id_: ClientInRound(id_, ClientState.SELECTED) for id_ in fact["clients"]}
        for excuse in fact.get("excused", ()):
            excused = ClientInRound(0, ClientState.EXCUSED, reason=str(excuse["reason"]))
            clients |= {id_: replace(excused, client=id_) for id_ in excuse["clients"]}
        self._begin(begun, clients | chosen)

    def _begin(self, begun: Round, clients: Mapping[int, ClientInRound]) -> None:
        """Append a round; drop rounds with its number or a greater one."""
        if self.number >= begun.number:
            self._keep(sum(round_.number < begun.number for round_ in self._rounds))
        self._rounds.append(begun)
        self._chosen.append(dict(sorted(clients.items())))
        self._stale.append(())
        self._changed.add(len(self._rounds) - 1)
        if self._most is not None and len(self._rounds) > self._most:
            del self._rounds[0], self._chosen[0], self._stale[0]
            self._changed = {at - 1 for at in self._changed if at}
            if self._num_packed:
                self._num_packed, self._are_sums_due = self._num_packed - 1, True
        self._pack()

    def _change(self, fact: Mapping[str, Any], client: int, **changes: Any) -> None:
        """Change fields of a client's record in the round that the fact names."""
        at = self._place(fact["round_num"])
        if at is None:
            return
        chosen, stale = self._clients(at)
        record = chosen.get(client)
        if record is None:
            return
        if not self._rounds[at].is_open:  # the close has already marked it late
            changes.pop("state", None)
        chosen[client] = replace(record, **changes)
        self._put(at, chosen, stale)
        self._are_sums_due |= at < self._num_packed

    def _close(self, event: Event) -> None:
        fact = event.payload
        at = self._place(fact["round_num"])
        if at is None:  # its beginning was not read
            self._begin(Round(fact["round_num"], event.time_s, clients=()), {})
            at = len(self._rounds) - 1
        accepted = {update["client"]: update for update in fact["accepted"]}
        chosen = {
            client.client: _closed(client, accepted.get(client.client))
            for client in self._clients(at)[0].values()
        }
        stale = tuple(
            self._late(number, late) for number, late in accepted.items() if number not in chosen
        )
        self._put(at, chosen, stale)
        self._are_sums_due |= at < self._num_packed
        counted = [entry for entry in (*chosen.values(), *stale) if entry.state is ClientState.DONE]
        self._rounds[at] = replace(
            self._rounds[at],
            seconds=event.time_s - self._rounds[at].began_s,
            loss=mean_loss(counted),
            reason=str(fact["reason"]),
            told_loss=numbers(fact.get("metrics")).get(TRAIN_LOSS),
            metrics=numbers(fact.get("metrics")),
        )

    def _late(self, client: int, accepted: Mapping[str, Any]) -> ClientInRound:
        """Make the newest round's record of an earlier round's late update that it accepts."""
        staleness = accepted.get("staleness", 0)
        earlier = self._place(self._rounds[-1].number - staleness)
        trained = None if earlier is None else self._clients(earlier)[0].get(client)
        trained = trained or ClientInRound(client, ClientState.DONE)
        samples = accepted["num_samples"]
        return replace(trained, state=ClientState.DONE, staleness=staleness, num_samples=samples)

    def _place(self, number: int) -> int | None:
        """Return the index in `_rounds` of the round with this number; None if there is none."""
        at = number - self._rounds[0].number if self._rounds else -1
        return at if 0 <= at < len(self._rounds) and self._rounds[at].number == number else None


def _times(clients: Iterable[ClientInRound]) -> Iterator[float]:
    return (client.seconds for client in clients if client.num_samples)


_KINDS: Final = frozenset((
    "ClientsSelected", "ClientsAssigned", "UpdateReceived", "UpdateRejected", "RoundWaits",
    "RoundClosed", "SegmentCommitted", "Evaluated", "ClientLeft",
))  # fmt: skip


def _deadline(event: Event) -> float | None:
    """Return the time from the selection of clients to the deadline; None if there is no deadline,
    or the coordinator was too old to give both by one clock."""
    deadline_s, leader_s = event.payload.get("deadline_s"), event.leader_s
    return deadline_s - leader_s if deadline_s is not None and leader_s else None


def _closed(client: ClientInRound, accepted: Mapping[str, Any] | None) -> ClientInRound:
    """Return a client's record after the close of its round. accepted: the entry of the client's
    update in the closing fact; None if the round closed without it."""
    if accepted is not None:
        staleness = accepted.get("staleness", 0)
        if client.state is ClientState.DONE and client.staleness == staleness:
            return client
        return replace(client, state=ClientState.DONE, staleness=staleness)
    if client.state in (ClientState.REJECTED, ClientState.EXCUSED):
        return client
    return replace(client, state=ClientState.LATE)

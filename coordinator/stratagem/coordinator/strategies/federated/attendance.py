"""Which clients of a federation take part: who has left, who is awaited, who sits on the bench.

Pure folds; open_roster.py and strikes.py decide on the value.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stratagem.coordinator.core.facts import ClientBenched, Excused, UpdateRejected

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Departure:
    """Why a client of an open roster has left."""

    reason: str
    asked_again_s: float | None = None
    """Leader-clock time before which it is not asked again, unless its worker registers anew: it
    has refused. None: it joins as soon as its worker is here."""
    since_s: float = 0.0
    """Leader-clock time at which it left."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """What is known of the clients of a federation besides what they answer."""

    left: Mapping[int, Departure] = field(default_factory=dict)
    """The clients that have left, until they join again; of an open roster."""
    awaited_until_s: Mapping[int, float] = field(default_factory=dict)
    """Clients that something is expected of and that have no worker: leader-clock time at which
    they are taken to have left."""
    waits_until_s: float | None = None
    """Leader-clock time at which the run fails for want of clients."""
    excused: tuple[Excused, ...] = ()
    """The clients that could not be asked to take part in the open round."""
    strikes: Mapping[int, int] = field(default_factory=dict)
    """Rounds in a row in which a client was rejected by its own fault."""
    benched: Mapping[int, int] = field(default_factory=dict)
    """The first round in which a benched client may take part again."""

    @property
    def has_history(self) -> bool:
        """True when earlier rounds decide about who takes part in later ones."""
        return bool(self.strikes or self.benched)

    def resumed(self) -> "Attendance":
        """Return the attendance after a run was resumed: whoever has left and is here may join."""
        left = {client: replace(gone, asked_again_s=None) for client, gone in self.left.items()}
        return replace(self, left=left, awaited_until_s={}, waits_until_s=None, excused=())

    def is_able(self, client: int, round_num: int) -> bool:
        """Return True when the client may take part in a round, if its worker is here."""
        return client not in self.left and self.benched.get(client, 0) <= round_num

    def awaiting(self, clients: Iterable[int], until_s: float) -> "Attendance":
        """Return the attendance with more clients that are awaited, unless they are already."""
        new = dict.fromkeys(clients, until_s)
        return replace(self, awaited_until_s={**new, **self.awaited_until_s})

    def here(self, clients: Iterable[int]) -> "Attendance":
        """Return the attendance with clients that need not be awaited any more."""
        awaited = without(self.awaited_until_s, clients)
        return self if awaited is self.awaited_until_s else replace(self, awaited_until_s=awaited)

    def after_round(
        self, has_strikes: bool, answered: Iterable[int], rejected: Mapping[int, UpdateRejected]
    ) -> "Attendance":
        """Return the attendance after a round: who has answered is free of strikes, who has failed
        has one more."""
        ended = replace(self, waits_until_s=None, excused=())
        if not has_strikes:
            return ended
        failed = (client for client, fact in rejected.items() if fact.cause.is_fault)
        strikes = dict(without(self.strikes, answered))
        for client in failed:
            strikes[client] = strikes.get(client, 0) + 1
        return replace(ended, strikes=strikes)

    def with_bench(self, fact: ClientBenched) -> "Attendance":
        """Return the attendance with a client on the bench, where its strikes are forgotten."""
        strikes = without(self.strikes, [fact.client])
        return replace(
            self, strikes=strikes, benched={**self.benched, fact.client: fact.until_round}
        )


def without(values: Mapping[int, T], clients: Iterable[int]) -> Mapping[int, T]:
    """Return a mapping without some clients; the same one where it has none of them."""
    gone = values.keys() & set(clients)
    if not gone:
        return values
    return {client: value for client, value in values.items() if client not in gone}

"""Derive what the facts of a run claim: the digest of each state and of each client's update.

Two executions of one job make the same claims in bits, whichever workers compute them. A claim
that timing has decided, such as a round that its deadline closed, cannot be checked by computing
it again, and neither can those that follow from it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from stratagem.client.course.views import Event
from stratagem.common.base.ids import Party, is_within


class ClaimPlace(NamedTuple):
    """The place of a claim in a run: a state after some steps, or a client's update of a round."""

    party: str
    step: int
    """Steps of the party, or rounds of a federation."""
    client: int | None = None
    """The client whose update it is; None for a state."""
    after: int = 0
    """The step of the newest state of the party above: a client's steps begin with each round."""

    def __str__(self) -> str:
        """Return the place in words, such as "member2: state after 40 steps"."""
        if self.client is None:
            text = f"state after {self.step} step{'s' * (self.step != 1)}"
        else:
            text = f"update of client {self.client} in round {self.step}"
        after = f" from step {self.after}" if self.after else ""
        return f"{self.party}{after}: {text}" if self.party else text


@dataclass(frozen=True, slots=True)
class Claim:
    """The digest that a run has recorded for a place."""

    place: ClaimPlace
    digest: str
    segment: int
    workers: tuple[str, ...]
    """The workers that have computed it, as far as the facts say."""
    numerics: str
    """The fingerprint of their numerics; empty where the facts do not say."""
    doubt: str = ""
    """Why computing it again may give other bits; empty if it must give the same."""


class RunClaims:
    """The claims of a run in the order of their facts; a later claim replaces one of its place."""

    def __init__(self) -> None:
        """Begin without claims."""
        self.by_place: dict[ClaimPlace, Claim] = {}
        self._members: dict[str, tuple[str, ...]] = {}
        self._assigned: dict[tuple[str, int], str] = {}
        self._numerics: dict[str, str] = {}
        self._doubts: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        """The step of the newest state of each party."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> "RunClaims":
        """Return the claims that events make."""
        claims = cls()
        for event in events:
            claims.add(event)
        return claims

    def add(self, event: Event) -> Claim | None:
        """Take an event in. Return the claim that it makes, if any."""
        payload = event.payload
        party = payload.get("party", "")
        self._note(event.kind, party, payload)
        place = _place(event.kind, party, payload)
        if place is None or not payload["digest"]:
            return None
        if party:
            place = place._replace(after=self._steps.get(party.rpartition("/")[0], 0))
        if place.client is None:
            self._steps[party] = place.step
        workers = self._members.get(party, ())
        if place.client is not None:
            assigned = self._assigned.get((party, place.client))
            workers = (assigned,) if assigned else ()
        doubts = (reason for above, reason in self._doubts.items() if _depends(party, above))
        claim = Claim(
            place,
            payload["digest"],
            payload.get("segment", place.step),
            workers,
            self._numerics.get(party, ""),
            next(doubts, ""),
        )
        self.by_place.pop(place, None)  # its new place is at the end
        self.by_place[place] = claim
        return claim

    def _note(self, kind: str, party: str, payload: Mapping[str, Any]) -> None:
        match kind:
            case "MembersFormed":
                self._members[party] = tuple(each["worker_id"] for each in payload["members"])
                self._numerics[party] = payload["fingerprint"]
            case "ClientsAssigned":
                for each in payload["assignments"]:
                    member = each["member"]
                    self._assigned[party, each["client"]] = member["worker_id"] if member else ""
            case "RoundClosed" if late := [each for each in payload["accepted"] if each["base"]]:
                self._doubts[party] = (
                    f"round {payload['round_num']} took an update of an earlier round, "
                    f"that of client {late[0]['client']}"
                )
        if payload.get("by_policy"):
            number = payload.get("round_num", payload.get("segment", 0))
            self._doubts[party] = f"timing decided about round or segment {number}"

    @property
    def last_step(self) -> int:
        """Return the last step of the root party that has a claim, 0 if there is none."""
        return max((place.step for place in self.by_place if not place.party), default=0)


def _place(kind: str, party: str, payload: Mapping[str, Any]) -> ClaimPlace | None:
    match kind:
        case "ModelBuilt" | "SegmentCommitted":
            return ClaimPlace(party, payload["step"])
        case "UpdateReceived":
            return ClaimPlace(party, payload["round_num"], payload["client"])
        case _:
            return None


def _depends(party: str, other: str) -> bool:
    """Return whether the states of a party follow from those of the other one."""
    return is_within(Party(party), Party(other)) or is_within(Party(other), Party(party))


def first_difference(run: RunClaims, other: RunClaims) -> tuple[Claim, Claim] | None:
    """Return the claims of the first place, in the run's order, in which both differ."""
    for place, claim in run.by_place.items():
        again = other.by_place.get(place)
        if again is not None and again.digest != claim.digest:
            return claim, again
    return None

"""Derive what the facts of a run claim: the digest of each state and of each client's update.

Two executions of one job make the same claims in bits, whichever workers compute them. A claim
that timing or a machine's failure has decided cannot be checked by computing it again, and neither
can those that follow it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from stratagem.client.course.views import Event
from stratagem.common.numerics.verification import VERIFIER

Input = tuple[str, str]
"""An input of a run: its kind, and the party or client that computes from it."""
RULES, NUM_ROWS, ROWS, ROSTER = "numerics rules", "number of rows", "rows", "roster"
NUM_SAMPLES = "number of samples"
"""The kinds of inputs."""
OF_MACHINES: Final = frozenset(
    {"memory", "crashed", "timeout", "keys_lost", "absent", "outside_window"}
)
"""Causes of failures that come from a machine, and that another run of the job may not meet."""


class ClaimPlace(NamedTuple):
    """What a claim is about: a state after some steps, or a client's update of a round."""

    party: str
    step: int
    """The number of steps of the party; in a federation, of rounds."""
    client: int | None = None
    """The client whose update it is; None for a state."""
    after: int = 0
    """The step of the parent party's newest state, as a client's steps begin anew in each round."""
    kind: str = "state"
    """For a state: "state", its "average" or its "predictions"."""

    @property
    def is_root_state(self) -> bool:
        """Return whether this is a state of the whole run, one of its commits."""
        return not self.party and self.client is None and self.kind == "state"

    def __str__(self) -> str:
        """Return the place in words, such as "member2: state after 40 steps"."""
        if self.client is None:
            text = f"{self.kind} after {self.step} step{'s' * (self.step != 1)}"
        else:
            text = f"update of client {self.client} in round {self.step}"
        after = f" from step {self.after}" if self.after else ""
        return f"{self.party}{after}: {text}" if self.party else text


@dataclass(frozen=True, slots=True)
class Claim:
    """The digest that a run has recorded for a state or an update."""

    place: ClaimPlace
    digest: str
    segment: int
    workers: tuple[str, ...]
    """The workers that have computed the state or update, as far as the facts say."""
    numerics: str
    """The fingerprint of these workers' numerics; empty if the facts do not say."""
    doubt: str = ""
    """Why computing the state or update again may give other bits; empty if it must not."""


class RunClaims:
    """The claims of a run in the order of their facts; the latest claim of each place counts."""

    def __init__(self) -> None:
        """Begin without claims."""
        self.by_place: dict[ClaimPlace, Claim] = {}
        self.inputs: dict[Input, Any] = {}
        """What the run computes from besides its job."""
        self.doubt = ""
        """Why later claims may differ when they are computed again; empty if they must not."""
        self._members: dict[str, tuple[str, ...]] = {}
        self._assigned: dict[tuple[str, int], str] = {}
        self._numerics: dict[str, str] = {}
        self._masked: set[str] = set()
        """Parties whose updates are masked by random keys, so that only their sums repeat."""
        self._steps: dict[str, int] = {}
        """The step of the newest state of each party."""
        self._segments: dict[tuple[str, int], int] = {}
        """The step of each segment of a party."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> "RunClaims":
        """Return the claims that events make."""
        claims = cls()
        for event in events:
            claims.add(event)
        return claims

    def add(self, event: Event) -> list[Claim]:
        """Process the next event; return the claims that it makes."""
        payload = event.payload
        party = payload.get("party", "")
        if party == VERIFIER:  # it claims nothing for the run
            return []
        self._note(event.kind, party, payload)
        self.inputs.update(inputs_of(event))
        self.doubt = self.doubt or doubt_of(event.kind, payload)
        claims = []
        for place, digest in self._places(event.kind, party, payload):
            if party:
                place = place._replace(after=self._steps.get(party.rpartition("/")[0], 0))
            workers = self._members.get(party, ())
            if place.client is not None:
                assigned = self._assigned.get((party, place.client))
                workers = (assigned,) if assigned else ()
            segment = payload.get("segment", payload.get("generation", place.step))
            if place.client is None and place.kind == "state":
                self._steps[party] = self._segments[party, segment] = place.step
            numerics = self._numerics.get(party, "")
            claim = Claim(place, digest, segment, workers, numerics, self.doubt)
            self.by_place.pop(place, None)  # its new place is at the end
            self.by_place[place] = claim
            claims.append(claim)
        return claims

    def _note(self, kind: str, party: str, payload: Mapping[str, Any]) -> None:
        match kind:
            case "MembersFormed":
                self._members[party] = tuple(worker["worker_id"] for worker in payload["members"])
                self._numerics[party] = payload["fingerprint"]
            case "ClientsAssigned":
                for task in payload["assignments"]:
                    member = task["member"]
                    self._assigned[party, task["client"]] = member["worker_id"] if member else ""
            case "KeysPosted":
                self._masked.add(party)
            case "RunResumed" if payload["from_segment"] is not None:
                step = payload["step"]
                self._steps = {"": step}  # of what follows, the run may do less than before
                places = [place for place in self.by_place if place.party or place.step <= step]
                self.by_place = {place: self.by_place[place] for place in places}

    def _places(
        self, kind: str, party: str, payload: Mapping[str, Any]
    ) -> Iterator[tuple[ClaimPlace, str]]:
        """Yield the places that a fact claims something for, and the digests."""
        match kind:
            case "ModelBuilt" | "SegmentCommitted" | "GenerationClosed" | "Noted":
                if payload["digest"]:
                    yield ClaimPlace(party, payload["step"]), payload["digest"]
                if average := payload.get("average"):
                    yield ClaimPlace(party, payload["step"], kind="average"), average
            case "Evaluated" if digest := payload.get("predictions"):
                step = self._segments.get((party, payload["segment"]), self._steps.get(party, 0))
                yield ClaimPlace(party, step, kind="predictions"), digest
            case "UpdateReceived" if party not in self._masked and payload["digest"]:
                place = ClaimPlace(party, payload["round_num"], payload["client"])
                yield place, payload["digest"]

    @property
    def last_step(self) -> int:
        """Return the last step of the root party that has a state, 0 if there is none."""
        return max((place.step for place in self.by_place if place.is_root_state), default=0)


def inputs_of(event: Event) -> Mapping[Input, Any]:
    """Return the inputs of the run that an event records."""
    payload = event.payload
    party = payload.get("party", "")
    match event.kind:
        case "RunSubmitted":
            return {(RULES, ""): payload.get("numerics", 1)}
        case "ModelBuilt":
            rows = {(ROWS, party): payload["rows"]} if payload.get("rows") else {}
            return {(NUM_ROWS, party): payload.get("num_rows", {}), **rows}
        case "RosterFormed":
            return {(ROSTER, party): {c["client"]: c["worker_id"] for c in payload["clients"]}}
        case "UpdateReceived":
            client = f"client {payload['client']} in round {payload['round_num']}"
            name = f"{party}: {client}" if party else client
            return {(NUM_SAMPLES, name): payload.get("num_samples")}
        case _:
            return {}


def doubt_of(kind: str, payload: Mapping[str, Any]) -> str:
    """Return why claims after a fact may differ when they are computed again, because timing or a
    machine has decided something; otherwise "". The coordinator marks a run as not reproducible by
    these facts."""
    number = payload.get("round_num", payload.get("segment", payload.get("generation", 0)))
    match kind:
        case "RoundClosed" if late := [update for update in payload["accepted"] if update["base"]]:
            client = late[0]["client"]
            return f"round {number} took an update of an earlier round, that of client {client}"
        case "RunResumed" if payload["by_policy"]:
            return "the run was resumed without all that its strategy had kept"
        case "Evaluated" if payload.get("without"):
            return f"segment {number} was evaluated without clients that were away"
        case "UpdateRejected" if payload.get("cause") in OF_MACHINES:
            return f"a machine, not the job, left out client {payload['client']} in round {number}"
        case "KeysPosted" | "SharesRouted" if dropped := [
            record["client"] for record in payload["left_out"] if record["cause"] in OF_MACHINES
        ]:
            return f"a machine, not the job, left out client {dropped[0]} in round {number}"
        case "PartyFailed" if payload.get("cause") in OF_MACHINES:
            return f"{payload['party'] or 'the run'} failed by its machine: {payload['cause']}"
        case "RoundWaits":
            return f"round {number} waited for clients"
        case "ClientsJoined":
            return "clients joined while the run trained"
        case "ClientStateLost":
            return f"client {payload['client']} lost what it had kept, before round {number}"
        case "MemberEvolved":
            return "members evolved in the order in which they finished"
        case _ if payload.get("by_policy"):
            return f"timing decided about round or segment {number}"
    return ""


def first_difference(run: RunClaims, other: RunClaims) -> tuple[Claim, Claim] | None:
    """Return both claims of the first place, in the run's order, where they differ; else None."""
    for place, claim in run.by_place.items():
        again = other.by_place.get(place)
        if again is not None and again.digest != claim.digest:
            return claim, again
    return None

"""Derive the claims of a run from its facts: the digest of each state and of each client's update.

Two executions of one job make bit-identical claims, whichever workers compute them. A claim that
timing or a machine's failure has influenced cannot be checked by computing it again, and neither
can the claims after it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from stratagem.client.course.views import Event
from stratagem.common.base.ids import is_within
from stratagem.common.numerics.verification import VERIFIER

Input = tuple[str, str]
"""The key of an input of a run: the kind, and the party or client that the input belongs to."""
RULES, NUM_ROWS, ROWS, ROSTER = "numerics rules", "number of rows", "rows", "roster"
NUM_SAMPLES = "number of samples"
"""One of the kinds of inputs, like the names above."""
OF_MACHINES: Final = frozenset(
    {"memory", "crashed", "timeout", "keys_lost", "absent", "outside_window"}
)
"""Causes of failures that lie in a machine, so another run of the job may not meet them."""


class ClaimPlace(NamedTuple):
    """The subject of a claim: a party's state after some steps, or a client's update of a round."""

    party: str
    step: int
    """The number of steps that the party has done; in a federation, of rounds."""
    client: int | None = None
    """The number of the client that sent the update; None if the claim is about a state."""
    after: int = 0
    """The step of the parent party's newest state; in each of its rounds, steps restart from 0."""
    kind: str = "state"
    """The kind of state: "state", the "average" of its parameters, or its "predictions"."""

    @property
    def is_root_state(self) -> bool:
        """Return whether the claim is about a state of the whole run, one of its commits."""
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
    """The digest that a run has recorded for a state or for a client's update."""

    place: ClaimPlace
    digest: str
    segment: int
    workers: tuple[str, ...]
    """The workers that computed the state or update, as far as the facts name them."""
    numerics: str
    """The fingerprint of these workers' numerics; empty if the facts do not say."""
    doubt: str = ""
    """The reason why a second computation may give other bits; empty if the bits must be equal."""


class RunClaims:
    """The newest claim of a run about each state or update, in the order of their facts."""

    def __init__(self) -> None:
        """Begin without claims."""
        self.by_place: dict[ClaimPlace, Claim] = {}
        self.inputs: dict[Input, Any] = {}
        """The inputs that the run computes from besides its job, such as the number of rows."""
        self.doubt = ""
        """The reason why later claims may have other bits in a second run, if there is one."""
        self._members: dict[str, tuple[str, ...]] = {}
        self._assigned: dict[tuple[str, int], str] = {}
        self._numerics: dict[str, str] = {}
        self._masked: set[str] = set()
        """Parties whose clients mask updates by random keys, so only the sums are reproducible."""
        self._steps: dict[str, int] = {}
        """The step of the newest state of each party."""
        self._segments: dict[tuple[str, int], int] = {}
        """The step at which a segment ends, keyed by party and segment."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> "RunClaims":
        """Collect the claims that these events of a run make."""
        claims = cls()
        for event in events:
            claims.add(event)
        return claims

    def add(self, event: Event) -> list[Claim]:
        """Process the next event; return the claims that it makes."""
        payload = event.payload
        party = payload.get("party", "")
        if is_within(party, VERIFIER):  # it claims nothing for the run
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
        """Yield (place, digest) for each state or update whose digest the fact records."""
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
        """Return the step of the run's last committed state, or 0 if it has none."""
        return max((place.step for place in self.by_place if place.is_root_state), default=0)


def inputs_of(event: Event) -> Mapping[Input, Any]:
    """Return the inputs of the run that an event records, keyed by kind and party or client."""
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
    """Return the reason why claims after this fact may have other bits in a second run, because
    timing or a machine has influenced the result; "" if there is none. By the same facts the
    coordinator marks a run as not reproducible."""
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
    """Return the two claims about the first state or update, in the order of `run`, whose digests
    differ; None if none differ."""
    for place, claim in run.by_place.items():
        again = other.by_place.get(place)
        if again is not None and again.digest != claim.digest:
            return claim, again
    return None

"""What the pictures of a run are made of, read from its events one by one.

A run that goes on is read on: nothing of what was read is read again, and no event is kept.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from stratagem.client.course.client_sums import FederatedClient
from stratagem.client.course.clients import Home, fold_benches, homes, of_sums
from stratagem.client.course.members import MembersFolding
from stratagem.client.course.outages import OutagesFolding
from stratagem.client.course.payloads import party_of
from stratagem.client.course.population import PopulationFolding
from stratagem.client.course.rounds import Round, RoundsFolding
from stratagem.client.course.shapes import EventLike
from stratagem.client.pictures.curve_rows import Line
from stratagem.client.report.lines import LinesFolding
from stratagem.client.report.time_marks import TimeMarks

MAX_DECISIONS: Final = 1000


@dataclass(frozen=True, slots=True)
class Decision:
    """What a strategy has noted."""

    after_s: float
    """The beginning of the run."""
    party: str
    kind: str
    """In the strategy's own words."""
    reason: str


class PartyCourse:
    """What has happened in one party of a run."""

    def __init__(self, party: str) -> None:
        self._lines, self._rounds = LinesFolding(party), RoundsFolding(party)
        self._party = party
        self._roster: dict[int, Home] = {}
        self._benches: dict[int, int] = {}
        self.ranks: tuple[int, ...] = ()
        """Of each stage of a pipeline, in the newest membership."""
        self.worker_ids: tuple[str, ...] = ()
        """Of the newest membership with members."""
        self.engine = ""
        self.num_segments = 0
        """That have ended, those of all rounds of a silo together."""
        self.failure = ""
        """Why it has failed, as a sentence."""
        self.reached: list[tuple[float, int]] = []
        """Wall time and step of the ends of segments; neither ever decreases."""

    @property
    def lines(self) -> dict[str, Line]:
        """Return what was measured, by name of the metric."""
        return self._lines.lines

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Return the rounds of a federation."""
        return self._rounds.rounds

    @property
    def clients(self) -> tuple[FederatedClient, ...]:
        """Return the clients of a federation."""
        return of_sums(self._rounds.sums, self._rounds.number, self._roster, self._benches)

    @property
    def client_times(self) -> Sequence[float]:
        """Return the seconds that updates of the clients of a federation have taken."""
        return self._rounds.times

    def fold(self, event: EventLike) -> None:
        """Take the next event of the run."""
        self._lines.fold(event)
        self._rounds.fold(event)
        fold_benches(self._benches, event, self._party)

    def fold_own(self, event: EventLike) -> None:
        """Take the next event that is about this party."""
        match event.kind:
            case "RosterFormed" | "ClientsJoined":
                self._roster |= homes(event)
            case "MembersFormed" if event.payload["members"]:
                self.ranks = tuple(event.payload.get("ranks") or ())
                members = event.payload["members"]
                self.worker_ids = tuple(member["worker_id"] for member in members)
            case "SegmentFinished":
                self.engine = str(event.payload["engine"])
                self.num_segments += 1
                at, step = self.reached[-1] if self.reached else (0.0, 0)
                self.reached.append((max(at, event.time_s), max(step, event.payload["step"])))
            case "PartyFailed":
                self.failure = event.sentence


class RunCourse:
    """What has happened to a run, for its pictures."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        """job: of the run, as its status has it."""
        self._job = job
        self.num_events = self.num_returns = 0
        """Those that were read, and how many of them have gone back to an earlier commit."""
        self.began_s: float | None = None
        """Wall time of the first event; None: there is none yet."""
        self.newest_s = 0.0
        """Wall time of the newest event."""
        self.parties: dict[str, PartyCourse] = {"": PartyCourse("")}
        """By path, in order of first mention; "" is the root."""
        self.members = MembersFolding()
        self.population = PopulationFolding(job)
        """Of the whole run, where it is one."""
        self.populations: dict[str, PopulationFolding] = {"": self.population}
        """That of the whole run, and those of parties, by path."""
        self.time_marks, self.outages = TimeMarks(), OutagesFolding()
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        """Of a strategy that is not one of the built-in ones, the newest ones."""

    @classmethod
    def of(cls, events: Iterable[EventLike], job: Mapping[str, Any]) -> Self:
        """Return the course of a run with these events."""
        course = cls(job)
        course.take(events)
        return course

    def take(self, events: Iterable[EventLike]) -> None:
        """Read on, with the events that follow those that were read."""
        for event in events:
            self._fold(event)

    @property
    def root(self) -> PartyCourse:
        """Return what has happened in the party that is the whole run."""
        return self.parties[""]

    def _fold(self, event: EventLike) -> None:
        self.num_events += 1
        self.began_s = event.time_s if self.began_s is None else self.began_s
        self.newest_s = event.time_s
        party = party_of(event)
        if party not in self.parties:
            self.parties[party] = PartyCourse(party)
        concerned: Sequence[PartyCourse] = [self.parties[party]]
        if event.kind == "RunResumed":
            self.num_returns += 1
            concerned = list(self.parties.values())
        for each in concerned:
            each.fold(event)
        self.parties[party].fold_own(event)
        self.members.fold(event)
        if event.kind == "PopulationFormed" and party not in self.populations:
            self.populations[party] = PopulationFolding(self._job, party)
        for of_one in {party, party.rpartition("/")[0]} & self.populations.keys():
            self.populations[of_one].fold(event)
        outage = self.outages.fold(event)
        if outage is not None:
            self.time_marks.add_outage(outage, self.began_s)
        self.time_marks.fold(event, self.began_s)
        if event.kind == "Noted":
            kind, reason = str(event.payload["kind"]), str(event.payload.get("reason") or "")
            self.decisions.append(Decision(event.time_s - self.began_s, party, kind, reason))

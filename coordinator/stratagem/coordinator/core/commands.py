"""The commands to the coordinator, the refusals that answer them, and the entries of the journal,
all as values.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from stratagem.common.base.ids import Digest, Incarnation, Party, RunId
from stratagem.coordinator.core.facts import ROOT, Capability, Fact, Member

# ---- Commands ----


@dataclass(frozen=True, slots=True)
class SubmitRun:
    run_id: RunId
    job_json: str
    wall_s: float
    by: str = ""
    """The caller's identity; empty if callers are not authenticated."""
    traceparent: str = ""
    """Trace context of the call that submits the run; see RunSubmitted."""
    owner: str = ""
    """The owner that the run will have; see RunSubmitted."""
    submission: str = ""
    """A name that no other submission has; see RunSubmitted."""


@dataclass(frozen=True, slots=True)
class ClaimData:
    """Note that all bytes of a blob were received from an owner and are durable."""

    owner: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class CancelRun:
    run_id: RunId
    by: str = ""


@dataclass(frozen=True, slots=True)
class ResumeRun:
    run_id: RunId
    by: str = ""
    from_segment: int | None = None
    """The segment of a kept commit; None: the last one."""


@dataclass(frozen=True, slots=True)
class DeleteRun:
    run_id: RunId
    by: str = ""


@dataclass(frozen=True, slots=True)
class PinRun:
    """Keep a run until it is unpinned, or leave it to the retention limits again."""

    run_id: RunId
    is_pinned: bool
    by: str = ""


@dataclass(frozen=True, slots=True)
class HoldBlobs:
    """Keep blobs until a time of the leader's clock, whatever becomes of their runs, because a
    backup copies them."""

    listed: Digest
    """A blob that lists them."""
    until_s: float
    by: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a worker process, as the next process of the same worker name reports it."""

    incarnation: Incarnation
    """Incarnation of the process that has ended."""
    status: int | None = None
    """Exit status; negative: the number of the signal that ended it; None: not observed."""
    is_stopped: bool = False
    """True if something outside the process stopped it."""
    run_id: RunId | None = None
    """The run whose plan it executed; "": it executed none; None: that is not known."""
    party: Party = ROOT
    """The party whose plan it executed."""
    step: int | None = None
    lines: tuple[str, ...] = ()
    """The last lines that it printed."""


@dataclass(frozen=True, slots=True)
class ExpireRuns:
    """Delete runs that ended before a time of the leader's clock, and all but the newest ended
    runs; the oldest first, and at most `limit` at once."""

    ended_before_s: float
    num_kept: int
    limit: int
    reason: str


@dataclass(frozen=True, slots=True)
class RegisterWorker:
    member: Member
    address: str
    capability: Capability
    ending: Ending | None = None
    """The end of the worker's previous process, if it is known."""


@dataclass(frozen=True, slots=True)
class LoseWorker:
    """Declare a worker lost: its lease has expired, or its address does not answer."""

    member: Member
    reason: str
    is_blameless: bool = False
    """True if it had not begun its work, so the work cannot have ended it."""
    silent_s: float = 0.0
    """Seconds since its last heartbeat, if its silence is the reason."""


@dataclass(frozen=True, slots=True)
class DrainWorker:
    member: Member


@dataclass(frozen=True, slots=True)
class LeaveWorker:
    """Remove a worker that has finished its work and ends."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetWorkers:
    """Forget workers that were lost before a time of the leader's clock, with a separate time for
    those whose names do not come back, and all but the newest lost workers."""

    lost_before_s: float
    num_kept: int
    ephemeral_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Report the fact that an effect, or a part of one, has led to."""

    run_id: RunId
    fact: Fact


@dataclass(frozen=True, slots=True)
class ReportTrouble:
    """Report that the exchange of a party has failed although all its members answer."""

    run_id: RunId
    party: Party
    membership: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Make the coordinator decide again because a deadline has passed."""


AboutWorkers = RegisterWorker | LoseWorker | DrainWorker | LeaveWorker | ForgetWorkers
AboutRuns = SubmitRun | CancelRun | ResumeRun | DeleteRun | PinRun | ExpireRuns
AboutBlobs = ClaimData | HoldBlobs
Command = AboutRuns | AboutBlobs | AboutWorkers | Report | ReportTrouble | Tick


class RefusalKind(StrEnum):
    INVALID = "invalid"
    NOT_FOUND = "not found"
    CONFLICT = "conflict"
    PRECONDITION = "precondition"
    NOT_YET = "not yet"
    """The same command will be accepted shortly."""
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a command changes nothing, and the kind of that reason."""

    kind: RefusalKind
    reason: str


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A fact on its way into the journal; run_id "" stands for the cluster."""

    run_id: RunId
    fact: Fact
    key: str | None = None
    """Idempotency key, unique inside the run."""


# ---- Spans of events ----


@dataclass(frozen=True, slots=True)
class EventSpan:
    """The events from one index up to another, of some kinds, in one order or the other."""

    from_index: int = 0
    before_index: int | None = None
    """The first index beyond the span; None: the span reaches the newest event."""
    kinds: frozenset[str] = frozenset()
    """Names of facts; empty: all of them."""
    newest_first: bool = False

    def after(self, index: int) -> "EventSpan":
        """Return the rest of the span once this event was read."""
        if self.newest_first:
            return replace(self, before_index=index)
        return replace(self, from_index=index + 1)

    def wants(self, kind: str) -> bool:
        """Return True for a kind of event that is in the span."""
        return not self.kinds or kind in self.kinds

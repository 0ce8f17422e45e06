"""The commands to the coordinator, the refusals that answer them, and the entries of the journal,
all as values.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from stratagem.common.base.ids import Digest, Incarnation, Party, RunId, WorkerId
from stratagem.coordinator.core.facts import ROOT, Capability, Fact, Member, VerificationEnded

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
    """A unique name of this submission; see RunSubmitted."""


@dataclass(frozen=True, slots=True)
class ClaimData:
    """Record that an owner has uploaded all bytes of a blob, and that they are durable."""

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
    """The segment of the kept commit to return to; None: the last commit."""


@dataclass(frozen=True, slots=True)
class DeleteRun:
    run_id: RunId
    by: str = ""


@dataclass(frozen=True, slots=True)
class PinRun:
    """Pin a run, so that no retention limit deletes it, or unpin it."""

    run_id: RunId
    is_pinned: bool
    by: str = ""


@dataclass(frozen=True, slots=True)
class RecordVerification:
    """Record what a verification of an ended run has found."""

    result: VerificationEnded


@dataclass(frozen=True, slots=True)
class HoldBlobs:
    """Keep the blobs that a backup copies until a leader-clock time, even if runs are deleted."""

    listed: Digest
    """The blob that lists the blobs to keep."""
    until_s: float
    by: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a worker process, as reported by the worker's next process."""

    incarnation: Incarnation
    """Incarnation of the process that has ended."""
    status: int | None = None
    """Exit status; negative: the number of the signal that ended it; None: not observed."""
    is_stopped: bool = False
    """True if something outside the process stopped it on purpose."""
    run_id: RunId | None = None
    """The run whose plan the process executed; "": none; None: not known."""
    party: Party = ROOT
    """The party whose plan the process executed."""
    step: int | None = None
    lines: tuple[str, ...] = ()
    """The last lines that the process printed."""


@dataclass(frozen=True, slots=True)
class ExpireRuns:
    """Delete ended runs, the oldest first and at most `limit` at once: those that ended before a
    leader-clock time, and all but the newest num_kept."""

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
    """True if the worker had not begun its work, so the work cannot have ended its process."""
    silent_s: float = 0.0
    """Seconds since the worker's last heartbeat, if silence is the reason."""


@dataclass(frozen=True, slots=True)
class DrainWorker:
    member: Member


@dataclass(frozen=True, slots=True)
class LeaveWorker:
    """Remove a worker that has finished its work and is ending."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """Lift the quarantine of a worker."""

    worker_id: WorkerId
    by: str = ""


@dataclass(frozen=True, slots=True)
class ForgetWorkers:
    """Forget workers lost before a leader-clock time, and all lost workers but the newest.
    Ephemeral workers, whose names do not come back, have a time limit of their own."""

    lost_before_s: float
    num_kept: int
    ephemeral_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Report a fact that results from an effect, or from a part of an effect."""

    run_id: RunId
    fact: Fact


@dataclass(frozen=True, slots=True)
class ReportTrouble:
    """Report that the members of a party failed to exchange tensors although all of them answer."""

    run_id: RunId
    party: Party
    membership: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Make the coordinator decide again because a deadline has passed."""


AboutWorkers = (
    RegisterWorker | LoseWorker | DrainWorker | LeaveWorker | ReleaseWorker | ForgetWorkers
)
AboutRuns = SubmitRun | CancelRun | ResumeRun | DeleteRun | PinRun | RecordVerification | ExpireRuns
AboutBlobs = ClaimData | HoldBlobs
Command = AboutRuns | AboutBlobs | AboutWorkers | Report | ReportTrouble | Tick


class RefusalKind(StrEnum):
    INVALID = "invalid"
    NOT_FOUND = "not found"
    CONFLICT = "conflict"
    PRECONDITION = "precondition"
    NOT_YET = "not yet"
    """The same command will be accepted if it is repeated shortly."""
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a command changes nothing, and the kind of that reason."""

    kind: RefusalKind
    reason: str


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A fact to be journaled; run_id "" stands for the cluster."""

    run_id: RunId
    fact: Fact
    key: str | None = None
    """Idempotency key, unique inside the run."""


# ---- Spans of events ----


@dataclass(frozen=True, slots=True)
class EventSpan:
    """A range of a run's events by index, restricted to some kinds, oldest or newest first."""

    from_index: int = 0
    before_index: int | None = None
    """The first index after the span; None: the span extends to the newest event."""
    kinds: frozenset[str] = frozenset()
    """Names of the kinds of facts to include; empty: all."""
    newest_first: bool = False

    def after(self, index: int) -> "EventSpan":
        """Return the rest of the span after the event of this index was read."""
        if self.newest_first:
            return replace(self, before_index=index)
        return replace(self, from_index=index + 1)

    def wants(self, kind: str) -> bool:
        """Return True if the span includes events of this kind."""
        return not self.kinds or kind in self.kinds

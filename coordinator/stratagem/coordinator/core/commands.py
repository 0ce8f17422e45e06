"""What is asked of the coordinator, and how it refuses."""

from dataclasses import dataclass
from enum import StrEnum

from stratagem.common.base.ids import Digest, Incarnation, Party, RunId
from stratagem.coordinator.core.facts import ROOT, Capability, Fact, Member


@dataclass(frozen=True, slots=True)
class SubmitRun:
    run_id: RunId
    job_json: str
    wall_s: float
    by: str = ""
    """Who asks; empty where nobody has to say who they are."""
    traceparent: str = ""
    """Of the call that submits it; see RunSubmitted."""
    owner: str = ""
    """To whom it will belong; see RunSubmitted."""
    submission: str = ""
    """What no other submission is called; see RunSubmitted."""


@dataclass(frozen=True, slots=True)
class ClaimData:
    """All bytes of a blob have come from somebody, and are durable."""

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
    """One of the kept commits; None: the last one."""


@dataclass(frozen=True, slots=True)
class DeleteRun:
    run_id: RunId
    by: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker process has ended, as the next one of its name tells."""

    incarnation: Incarnation
    """Of the process that has ended."""
    status: int | None = None
    """Negative: the number of the signal that ended it; None: nobody saw it."""
    is_stopped: bool = False
    """Somebody else has ended it."""
    run_id: RunId | None = None
    """The run whose plan it executed; "" when it executed none; None: that is not known."""
    party: Party = ROOT
    """Whose plan that was."""
    step: int | None = None
    lines: tuple[str, ...] = ()
    """What it printed last."""


@dataclass(frozen=True, slots=True)
class ExpireRuns:
    """Delete runs that ended before this time of the leader's clock, and all but the newest of
    those that have ended; the oldest first, and not more than so many at once."""

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
    """Of the process before it, where that is known."""


@dataclass(frozen=True, slots=True)
class LoseWorker:
    """The lease of a worker has expired, or nobody answers at its address."""

    member: Member
    reason: str
    is_blameless: bool = False
    """It was given work, but had not begun: whatever ended it was not the work."""


@dataclass(frozen=True, slots=True)
class DrainWorker:
    member: Member


@dataclass(frozen=True, slots=True)
class LeaveWorker:
    """A worker has done what it had to do, and ends."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetWorkers:
    """Forget who was lost before this time of the leader's clock, and all but the newest of those
    that are lost."""

    lost_before_s: float
    num_kept: int


@dataclass(frozen=True, slots=True)
class Report:
    """An effect, or a part of one, is done: the fact that it led to."""

    run_id: RunId
    fact: Fact


@dataclass(frozen=True, slots=True)
class ReportTrouble:
    """The exchange of a party has failed although all its members answer."""

    run_id: RunId
    party: Party
    membership: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed a deadline; nothing else happened."""


AboutWorkers = RegisterWorker | LoseWorker | DrainWorker | LeaveWorker | ForgetWorkers
AboutRuns = SubmitRun | ClaimData | CancelRun | ResumeRun | DeleteRun | ExpireRuns
Command = AboutRuns | AboutWorkers | Report | ReportTrouble | Tick


class RefusalKind(StrEnum):
    INVALID = "invalid"
    NOT_FOUND = "not found"
    CONFLICT = "conflict"
    PRECONDITION = "precondition"
    NOT_YET = "not yet"
    """The same command will be taken in a moment."""
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a command changes nothing."""

    kind: RefusalKind
    reason: str


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A fact on its way into the journal; run_id "" is the cluster."""

    run_id: RunId
    fact: Fact
    key: str | None = None
    """Idempotency key, unique inside the run."""

"""Facts of the life of a run, from its submission until it is deleted."""

from stratagem.common.base.ids import Digest, Party
from stratagem.coordinator.core.facts.fact_values import ErrorRecord, Value
from stratagem.coordinator.core.facts.rejection_causes import Cause


class RunSubmitted(Value):
    job_json: str
    wall_s: float
    by: str = ""
    """The caller, as "client alice" or "token ci"; empty where callers are not authenticated."""
    traceparent: str = ""
    """Position of the run in a trace (W3C traceparent), if it is traced."""
    numerics: int = 1
    """Version of the rules that decide the run's bits; see common/numerics/rules.py."""
    owner: str = ""
    """The owner: `by`, and for a token also which one of that name it was; if empty, `by`."""
    submission: str = ""
    """Distinguishes the run from a deleted one of the same id in the names of what is
    stored of it; empty: those names do without."""


class RunCancelled(Value):
    reason: str
    by: str = ""


class RunResumed(Value):
    by: str = ""
    from_segment: int | None = None
    """The kept commit that the run continues from; what followed it is undone. None: its last
    one, with all that has happened since."""
    step: int = 0
    """Step of that commit."""
    digest: Digest = Digest("")
    by_policy: bool = False
    """True when the strategy keeps more than the commit holds, which starts afresh: the result is
    not what it would have been without."""
    streams: str = ""
    """Those of that commit."""
    average: Digest = Digest("")
    """That of that commit."""


class RunFailed(Value):
    reason: str
    error: ErrorRecord | None = None
    cause: Cause = Cause.UNKNOWN


class RunCompleted(Value):
    reason: str


class StoppedEarly(RunCompleted):
    """The run has completed before its last step, as an evaluation or the user's code has asked."""

    step: int = 0


class RunReleased(Value):
    """The workers have dropped the sessions of an ended run."""


class RunDeleted(Value):
    by: str = ""
    submission: str = ""
    """The submission of the deleted run, among runs of that id; see RunSubmitted."""


class RunExpired(RunDeleted):
    """The run was deleted by the retention limit for ended runs, without a request."""

    reason: str = ""


class PartyFailed(Value):
    """The user's code raised in a party, or the party cannot continue; the strategy around it
    decides what follows.

    At the root there is no strategy around it: the run fails.
    """

    party: Party
    reason: str
    error: ErrorRecord | None = None
    cause: Cause = Cause.UNKNOWN

"""This module defines the facts of the cluster, of runs from submission to deletion, and of
parties and populations.
"""

from collections.abc import Mapping

from stratagem.common.base.ids import Digest, Party, RunId, WorkerId
from stratagem.coordinator.core.facts.fact_values import (
    Capability,
    Cause,
    ErrorRecord,
    Member,
    Metrics,
    Number,
    PlainValues,
    Value,
)

# ---- Cluster ----
#
# Facts of the cluster itself have the empty run id. The summary takes the place of the facts of
# the past.


class WorkerRegistered(Value):
    member: Member
    address: str
    capability: Capability


class WorkerLost(Value):
    member: Member
    reason: str
    is_blameless: bool = False
    """True when it had not begun the work it was given, so that this cannot have ended it."""
    silent_s: float = 0.0
    """Seconds since its last beat, where its silence is the reason."""


class WorkerDraining(Value):
    member: Member


class WorkerLeft(Value):
    """A worker that was asked to end has ended. It is not lost, and its record is removed."""

    member: Member
    reason: str


class WorkersForgotten(Value):
    """Records of workers that were lost long ago are removed."""

    names: tuple[WorkerId, ...]


class DataUploaded(Value):
    """An owner has uploaded all bytes of a blob, and may name it in jobs from now on."""

    owner: str
    digest: Digest


class RunPinned(Value):
    """A run is kept until it is unpinned, or no more. A fact of the cluster: a run at rest has no
    new facts of its own, which would void its summary."""

    run_id: RunId
    is_pinned: bool
    by: str = ""


class BlobsHeld(Value):
    """Blobs are kept until a time of the leader's clock, though no run may need them: a backup
    copies them."""

    listed: Digest
    """The blob that lists them: there may be very many."""
    until_s: float
    by: str = ""


class KnownWorker(Value):
    """A worker as the facts of the past leave it; its fields are those of `state.WorkerRecord`."""

    member: Member
    address: str
    capability: Capability
    is_alive: bool = True
    is_draining: bool = False
    reason: str = ""
    is_blameless: bool = False
    lost_s: float = 0.0
    beat_s: float = 0.0
    registered_s: float = 0.0


class ClusterSummed(Value):
    """A part of the cluster's state, put in the place of facts that have led to it, which are
    deleted. All parts together, which follow each other, are the state; nobody decides it, so it
    is a fact of a journal, and never of a command."""

    workers: tuple[KnownWorker, ...] = ()
    uploads: Mapping[str, tuple[Digest, ...]] = {}
    pinned: tuple[RunId, ...] = ()
    holds: Mapping[Digest, float] = {}


# ---- Runs ----


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


# ---- Parties ----
#
# A party trains synchronously; its facts concern members, segments, commits and evaluations.


class MembersFormed(Value):
    """A party has these members from now on, in order of rank; with none it waits."""

    party: Party
    membership: int
    members: tuple[Member, ...]
    reason: str
    fingerprint: str = ""
    """Numerics that every member of the run has from here on; "" when any will do."""
    ranks: tuple[int, ...] = ()
    """Under model parallelism: for each partition the rank, within a replica, that owns it."""
    are_apart: bool = False
    """Members do not reach each other, so that none copies a state from another one."""


class ProcessDied(Value):
    """A member's process ended while it worked on a segment, and is not known to have been
    stopped."""

    party: Party
    member: Member
    segment: int
    at: Party | None = None
    """The party whose plan it executed: this party, or one below; None when not known."""
    step: int | None = None
    """How many steps it had applied since the run (of a client: its round) began, if known."""
    status: int | None = None
    """Exit status; negative: the number of the signal that ended it; None: not observed."""
    lines: tuple[str, ...] = ()
    """The last lines that it printed."""


class ModelBuilt(Value):
    """The model is built, and its state is committed as segment 0, or as what the run resumes."""

    party: Party
    digest: Digest
    size_bytes: int
    num_rows: Mapping[str, int]
    num_parameters: int
    layout_digest: str
    structural: tuple[str, ...] = ()
    """For a population's member: hyperparameters that give the state another layout, or a form that
    their optimizer cannot go on from, when they change from this member's values."""
    warning: str = ""
    """What is unusual about the job, as found once its data are known."""
    segment: int = 0
    """Number of that commit: of rounds, those that the run it comes from had done."""
    step: int = 0
    """Steps behind that state."""
    streams: str = ""
    """Of the run that it resumes: marks from which its streams of rows can be read on."""
    rows: str = ""
    """Some rows of its data, as their worker describes them for all others to compare with."""
    conversion: str = ""
    """Which tensors of the model the job's precision has given another dtype."""


class BuildFailed(Value):
    """One worker of a federation cannot build the model; another one, which has other rows, may."""

    party: Party
    member: Member
    reason: str
    error: ErrorRecord | None = None


class SegmentFinished(Value):
    """All members hold the same state at the end of a segment; it is not committed yet."""

    party: Party
    segment: int
    step: int
    membership: int
    loss: float
    num_rows: int
    seconds: float
    engine: str
    metrics: Metrics
    num_redone_steps: int = 0
    traffic: Mapping[str, int] = {}
    """With a codec: "sent_bytes" of all members in the segment, and "uncompressed_bytes"."""
    stop_reason: str = ""
    """Why the user's code has ended the training with this segment, at whatever step it was."""
    streams: str = ""
    """Where rows come as streams: marks from which they can be read on, by stream, as JSON."""
    kept: tuple[Digest, ...] = ()
    """SHA-256 of the file that each member, in order of rank, has written of what it alone has;
    none where the commit of the segment has all of it."""


class SegmentCommitted(Value):
    """The state at the end of a segment (or round) is stored in the blob store."""

    party: Party
    segment: int
    step: int
    digest: Digest
    size_bytes: int
    metrics: Metrics
    server_state: tuple[Digest, ...] = ()
    """For a federated round: the state of its server optimizer, one blob per slot."""
    max_staleness: int = 0
    """For a federated round: how many later rounds may still take updates of its clients."""
    average: Digest = Digest("")
    """For a federated round: the state with the averages of the parameters in their place; empty
    where there are none."""
    streams: str = ""
    """Those of the finished segment."""
    clip_norm: float | None = None
    """For a federated round with privacy: the clipping norm of the next one."""
    is_partial: bool = False
    """What only one member each has stays on the workers; see SegmentFinished.kept."""


class UploadDue(Value):
    """What only these workers have of the last commit is to be uploaded, in order of rank."""

    party: Party
    segment: int
    holders: tuple[Member, ...]
    reason: str


class CommitUploaded(Value):
    """The last commit is complete: what only workers had of it is stored with the rest."""

    party: Party
    segment: int
    digest: Digest
    size_bytes: int


class SoleCopiesLost(Value):
    """What only workers had of the last commit, or of a state with mirrors, cannot be had: the
    party returns to the last commit that was uploaded as a whole."""

    party: Party
    segment: int
    reason: str
    membership: int | None = None
    """Of the members that have missed it in a state that they trained on; None: in a commit."""


class Evaluated(Value):
    party: Party
    segment: int
    metrics: Metrics
    predictions: Digest = Digest("")
    """Blob of the model's outputs, where they were requested."""
    without: tuple[int, ...] = ()
    """Clients of a federation that are away, and that it was not waited for any longer."""


# ---- Facts of other strategies ----
#
# Strategies of other packages have no facts of their own and use these.


class Noted(Value):
    """A decision of a strategy that has no fact of its own for it."""

    party: Party
    kind: str
    """What was decided, in the strategy's own words."""
    data: PlainValues
    """Plain JSON values that the strategy folds into its run value."""
    reason: str = ""
    segment: int = 0
    digest: Digest = Digest("")
    """A state, of any party below, that becomes the run's commit of this segment."""
    step: int = 0
    metrics: Mapping[str, Number] = {}
    by_policy: bool = False
    """True when timing has decided: the result is replayable, not reproducible."""


# ---- Populations ----


class PopulationFormed(Value):
    """A population is formed, with the first hyperparameters of every member, in order of
    member."""

    party: Party
    params: tuple[PlainValues, ...]
    structural: tuple[str, ...] | None = None
    """Hyperparameters that are known to be structural before any model is built. None, in
    populations of earlier versions: copies may vary all, and are asked for them in the order of the
    job's text instead of that of their names."""


class Copied(Value):
    """A member continues from another one's state, with hyperparameters of its own."""

    member: int
    donor: int
    digest: Digest
    step: int
    params: PlainValues


class MemberEvolved(Value):
    """One member has trained a generation and continues at once, without waiting for the others."""

    party: Party
    generation: int
    member: int
    score: float | None
    copied: Copied | None = None


class GenerationClosed(Value):
    """All members have trained a generation. The best one's state is the run's commit."""

    party: Party
    generation: int
    scores: tuple[float | None, ...]
    """Higher is better, by member; None: invalid."""
    best: int
    digest: Digest
    step: int
    metrics: Metrics
    params: PlainValues
    """Hyperparameters of the best member when it reached its score."""
    copied: tuple[Copied, ...] = ()
    by_policy: bool = False
    """True when the order in which members finished has decided something."""

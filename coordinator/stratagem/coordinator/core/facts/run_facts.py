"""The facts of the cluster, of runs from submission to deletion, and of parties and populations."""

from collections.abc import Mapping

from stratagem.common.base.ids import Digest, Party, RunId, WorkerId
from stratagem.common.numerics.verification import Conclusion
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
# Facts of the cluster have the empty run id. The summary replaces the facts of the past.


class WorkerRegistered(Value):
    member: Member
    address: str
    capability: Capability


class WorkerLost(Value):
    member: Member
    reason: str
    is_blameless: bool = False
    """True if the worker had not begun its work, so the work cannot have ended its process."""
    silent_s: float = 0.0
    """Seconds since the worker's last heartbeat, if silence is the reason."""


class WorkerDraining(Value):
    member: Member


class WorkerLeft(Value):
    """A worker that was asked to end has ended. It is not lost, and its record is removed."""

    member: Member
    reason: str


class WorkerMarked(Value):
    """The worker took part in a segment that was refuted, and nobody could be blamed. Marks and
    quarantines belong to the worker's name, whichever process has it."""

    worker_id: WorkerId
    reason: str
    run_id: RunId = RunId("")
    """The run that has found it out; a strategy, which does not know it, leaves it empty."""


class WorkerQuarantined(Value):
    """The worker gets no more work until a person releases it."""

    worker_id: WorkerId
    reason: str
    run_id: RunId = RunId("")
    """See WorkerMarked."""


class WorkerReleased(Value):
    """The quarantine and the mark of a worker are lifted: it gets work again."""

    worker_id: WorkerId
    by: str = ""


class WorkersForgotten(Value):
    """Records of workers that were lost long ago are removed."""

    names: tuple[WorkerId, ...]


class DataUploaded(Value):
    """An owner has uploaded all bytes of a blob, and may name it in jobs from now on."""

    owner: str
    digest: Digest


class RunPinned(Value):
    """A run is pinned, so that no retention limit deletes it, or unpinned. The fact belongs to the
    cluster, because a new fact of an archived run would invalidate its summary."""

    run_id: RunId
    is_pinned: bool
    by: str = ""


class VerificationEnded(Value):
    """A verification of an ended run has ended. A fact of the cluster, for the reason of
    RunPinned."""

    run_id: RunId
    conclusion: Conclusion
    num_equal: int
    """The recorded digests that were computed again."""
    num_unverified: int
    workers: tuple[WorkerId, ...]
    """The workers that have computed them again."""
    wall_s: float
    by: str = ""


class BlobsHeld(Value):
    """The blobs that a backup copies are kept until a leader-clock time, even if no run needs
    them."""

    listed: Digest
    """The blob that lists the blobs to keep, since there may be very many."""
    until_s: float
    by: str = ""


class KnownWorker(Value):
    """A worker in a summary of the cluster, with the fields of `state.WorkerRecord`."""

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
    quarantine: str = ""
    marked_s: float = 0.0


class ClusterSummed(Value):
    """One part of a summary of the cluster's state, which replaces the facts that led to that
    state. Consecutive parts together are the whole state. No command leads to such a fact."""

    workers: tuple[KnownWorker, ...] = ()
    uploads: Mapping[str, tuple[Digest, ...]] = {}
    pinned: tuple[RunId, ...] = ()
    verifications: tuple[VerificationEnded, ...] = ()
    holds: Mapping[Digest, float] = {}


# ---- Runs ----


class RunSubmitted(Value):
    job_json: str
    wall_s: float
    by: str = ""
    """The caller, as "client alice" or "token ci"; empty if callers are not authenticated."""
    traceparent: str = ""
    """Position of the run in a trace (W3C traceparent), if it is traced."""
    numerics: int = 1
    """Version of the rules that fix the run's result bit for bit; see common/numerics/rules.py."""
    owner: str = ""
    """The owner: `by` and, for a token, also its identity, as another token may have had that name;
    if empty, `by`."""
    submission: str = ""
    """A part of the names of stored files that distinguishes the run from a deleted run of the same
    id; empty: the names have no such part."""


class RunCancelled(Value):
    reason: str
    by: str = ""


class RunResumed(Value):
    by: str = ""
    from_segment: int | None = None
    """The kept commit to which the run returns, with everything after it undone; None: the run goes
    on from where it ended."""
    step: int = 0
    """The step of the commit that the run returns to."""
    digest: Digest = Digest("")
    by_policy: bool = False
    """True if the strategy keeps more than the commit holds: the rest starts afresh, which changes
    the result."""
    streams: str = ""
    """The positions in streams of rows at that commit; see effects.Base."""
    average: Digest = Digest("")
    """The averaged parameters at that commit; see effects.Base."""
    reason: str = ""
    """The failure because of which the run continues from that commit."""


class RunFailed(Value):
    reason: str
    error: ErrorRecord | None = None
    cause: Cause = Cause.UNKNOWN


class RunCompleted(Value):
    reason: str


class StoppedEarly(RunCompleted):
    """The run has completed before its last step, as an evaluation or the user's code asked."""

    step: int = 0


class RunReleased(Value):
    """The workers have dropped the sessions of an ended run."""


class RunDeleted(Value):
    by: str = ""
    submission: str = ""
    """The submission of the deleted run; see RunSubmitted."""


class RunExpired(RunDeleted):
    """The run was deleted by the retention limit for ended runs, without a request."""

    reason: str = ""


class PartyFailed(Value):
    """The user's code raised in a party, or the party cannot continue; the enclosing strategy
    decides what follows.

    At the root there is no enclosing strategy: the run fails.
    """

    party: Party
    reason: str
    error: ErrorRecord | None = None
    cause: Cause = Cause.UNKNOWN


class ReplicasDiffer(PartyFailed):
    """Members that should hold the same state at the end of a segment hold different ones."""

    segment: int = 0
    step: int = 0
    minority: tuple[WorkerId, ...] = ()
    """The members whose state is not that of the majority; empty without a majority."""


# ---- Parties ----
#
# A party trains synchronously; its facts concern members, segments, commits and evaluations.


class MembersFormed(Value):
    """A party has these members from now on, by rank; without members it waits for workers."""

    party: Party
    membership: int
    members: tuple[Member, ...]
    reason: str
    fingerprint: str = ""
    """The numerics that every member of the run must have from now on; "" if any will do."""
    ranks: tuple[int, ...] = ()
    """The rank, within a replica, that owns each partition, under model parallelism."""
    are_apart: bool = False
    """True if members do not reach each other, so that none can copy a state from another."""


class ProcessDied(Value):
    """A member's process ended during its work on a segment and, as far as is known, was not
    stopped from outside."""

    party: Party
    member: Member
    segment: int
    at: Party | None = None
    """The party whose plan the process executed: this party, or one below; None: not known."""
    step: int | None = None
    """Steps that the process had applied since the run, or the client's round, began."""
    status: int | None = None
    """Exit status; negative: the number of the signal that ended it; None: not observed."""
    lines: tuple[str, ...] = ()
    """The last lines that the process printed."""


class ModelBuilt(Value):
    """The model is built; its state is committed as segment 0, or a later one in a resumed run."""

    party: Party
    digest: Digest
    size_bytes: int
    num_rows: Mapping[str, int]
    num_parameters: int
    layout_digest: str
    structural: tuple[str, ...] = ()
    """The hyperparameters of a population's member whose change gives the state another layout, or
    a form from which the optimizer cannot continue."""
    warning: str = ""
    """A warning about the job that could be given only once its data were known."""
    segment: int = 0
    """The segment of the initial commit; in a federation, the rounds done before."""
    step: int = 0
    """The steps applied before the initial state."""
    streams: str = ""
    """The positions at which the resumed run's streams of rows go on; see effects.Base."""
    rows: str = ""
    """A sample of the rows, described by the building worker, to compare with others' rows."""
    conversion: str = ""
    """The tensors of the model whose dtype the job's precision has changed, for people."""


class BuildFailed(Value):
    """One worker of a federation cannot build the model; another, with other rows, may be able."""

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
    """The "sent_bytes" of all members in the segment, and "uncompressed_bytes", with a codec."""
    stop_reason: str = ""
    """The reason with which the user's code ends the training after this segment; else empty."""
    streams: str = ""
    """The position in each stream of rows, as JSON keyed by stream; "" without streams."""
    kept: tuple[Digest, ...] = ()
    """SHA-256 of each member's file, in order of rank, with the parts that this member alone has;
    empty if the commit of the segment has all parts."""


class SegmentCommitted(Value):
    """The state at the end of a segment (or round) is stored in the blob store."""

    party: Party
    segment: int
    step: int
    digest: Digest
    size_bytes: int
    metrics: Metrics
    server_state: tuple[Digest, ...] = ()
    """The state of a federated round's server optimizer, one blob per slot."""
    max_staleness: int = 0
    """The number of later rounds that may still take updates of this federated round."""
    average: Digest = Digest("")
    """The state of a federated round with averages in place of the parameters; empty without
    averages."""
    streams: str = ""
    """The positions in streams of rows at the end of the segment; see SegmentFinished."""
    clip_norm: float | None = None
    """The clipping norm of the next federated round; None without privacy."""
    is_partial: bool = False
    """True if the parts that only one member has stay on the workers; see SegmentFinished.kept."""


class UploadDue(Value):
    """These workers, in order of rank, must upload the parts of the commit that they alone have."""

    party: Party
    segment: int
    holders: tuple[Member, ...]
    reason: str


class CommitUploaded(Value):
    """The last commit is whole: the parts that only workers had are stored with the rest."""

    party: Party
    segment: int
    digest: Digest
    size_bytes: int


class SoleCopiesLost(Value):
    """Parts of the last commit that only workers had, or parts of a mirrored state, are lost: the
    party returns to the last commit that was uploaded as a whole."""

    party: Party
    segment: int
    reason: str
    membership: int | None = None
    """The membership whose trained state lacks the parts; None: a commit lacks them."""


class Evaluated(Value):
    party: Party
    segment: int
    metrics: Metrics
    predictions: Digest = Digest("")
    """The blob of the model's outputs, if they were requested."""
    without: tuple[int, ...] = ()
    """Clients of a federation that were absent too long to be waited for."""


# ---- Verification ----
#
# A party of its own, the verifier, executes segments of the run again; see strategies/verified.py.


class SegmentVerified(Value):
    """Other workers have computed the same state at the end of a segment."""

    party: Party
    segment: int
    step: int
    digest: Digest
    workers: tuple[WorkerId, ...]
    """The workers that have computed it again."""


class SegmentRefuted(Value):
    """Another execution of a segment ended with another state; who is wrong, as far as is known.

    A run that was wrong returns to the newest state that is trusted.
    """

    party: Party
    segment: int
    step: int
    conclusion: Conclusion
    workers: tuple[tuple[WorkerId, ...], ...]
    """The workers of the run, of each further execution, and of each probe of a worker."""
    digests: tuple[Digest, ...] = ()
    """The states that these have computed; empty if the replicas of the run itself differ."""
    quarantined: tuple[WorkerId, ...] = ()
    """The workers that computed another state than the majority twice."""
    marked: tuple[WorkerId, ...] = ()
    """The workers of which one was wrong once; a second mark within a day quarantines."""


# ---- Facts of other strategies ----
#
# Strategies of other packages define no facts and use these.


class Noted(Value):
    """A decision of a strategy for which there is no special fact."""

    party: Party
    kind: str
    """The kind of decision, in the strategy's words."""
    data: PlainValues
    """Plain JSON values that the strategy folds into its run value."""
    reason: str = ""
    segment: int = 0
    digest: Digest = Digest("")
    """The state, of any nested party, that becomes the run's commit for this segment."""
    step: int = 0
    metrics: Mapping[str, Number] = {}
    by_policy: bool = False
    """True if timing has decided: the result is replayable, not reproducible."""


# ---- Populations ----


class PopulationFormed(Value):
    """A population is formed; its members start with these hyperparameters, in order of member."""

    party: Party
    params: tuple[PlainValues, ...]
    structural: tuple[str, ...] | None = None
    """The hyperparameters known to be structural before any model is built. None in populations of
    earlier versions: their copies may vary all hyperparameters, in the order of the job's text and
    not sorted by name."""


class Copied(Value):
    """A member continues from the state of another one, its donor, with other hyperparameters."""

    member: int
    donor: int
    digest: Digest
    step: int
    params: PlainValues


class MemberEvolved(Value):
    """One member has trained a generation and continues without waiting for the others."""

    party: Party
    generation: int
    member: int
    score: float | None
    copied: Copied | None = None


class GenerationClosed(Value):
    """All members have trained a generation; the state of the best member is the run's commit."""

    party: Party
    generation: int
    scores: tuple[float | None, ...]
    """The score of each member, higher is better; None: invalid."""
    best: int
    digest: Digest
    step: int
    metrics: Metrics
    params: PlainValues
    """The hyperparameters of the best member when it reached its score."""
    copied: tuple[Copied, ...] = ()
    by_policy: bool = False
    """True if the order in which members finished has influenced the result."""

"""Facts of parties that train synchronously: members, segments, commits, evaluations."""

from collections.abc import Mapping

from stratagem.common.base.ids import Digest, Party
from stratagem.coordinator.core.facts.fact_values import ErrorRecord, Member, Metrics, Value


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

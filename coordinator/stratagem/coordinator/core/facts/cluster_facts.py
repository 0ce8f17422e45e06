"""Facts of the cluster itself, under the empty run id: workers and uploaded data; and the summary
that takes the place of those of the past."""

from collections.abc import Mapping

from stratagem.common.base.ids import Digest, RunId, WorkerId
from stratagem.coordinator.core.facts.fact_values import Capability, Member, Value


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

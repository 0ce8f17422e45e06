"""The objects that a plan uses while it runs in the torch thread.

These values connect the process, a session and a plan: `Host` is the process, `SessionState` what a
session keeps in the torch thread between plans, `ExecutionContext` one plan's access to both.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, PermissionDeniedError
from stratagem.common.code import bundle
from stratagem.common.history import Recorder
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import check_numerics
from stratagem.common.privacy.noise import PrivacySecret
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.common.strategy import local_steps_of
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.data.readers import ReaderPool, WorkerReaders
from stratagem.worker.data.sources import DataSources
from stratagem.worker.engine import (
    Exchange,
    Inference,
    Joined,
    MemberTrainer,
    StepReport,
    Tally,
    Trainer,
    build_inference,
    build_trainer,
)
from stratagem.worker.engine.callbacks import NO_ANSWER, StepAnswer
from stratagem.worker.engine.slices import StateShare
from stratagem.worker.engine.state_format import state_metadata
from stratagem.worker.exchange.gradient_streams import GradientPort
from stratagem.worker.federated.client_trainer import ClientRunner
from stratagem.worker.federated.secure_rounds import SecureRounds
from stratagem.worker.federated.secure_secrets import SecretStore, WorkerSigner
from stratagem.worker.host.blobs import Blob, ReceivedBlobs
from stratagem.worker.host.client_states import ClientStateStore
from stratagem.worker.host.clock import CoordinatorClock, TorchThread
from stratagem.worker.host.exit_record import DeviceHealth, LastWords
from stratagem.worker.host.states import DirectStates
from stratagem.worker.mesh.choice import MeshOffer
from stratagem.worker.mesh.peers import PeerHub
from stratagem.worker.pipeline.activation_store import ActivationStore
from stratagem.worker.session.control import Control, Outbox
from stratagem.worker.session.finite import Masks
from stratagem.worker.session.replicas import KeptReplicas
from stratagem.worker.session.states import KeptSlices, StateStore, WorkStats
from stratagem.worker.site.gate import SiteAdmission, SiteGate
from stratagem.worker.user_code.entrypoints import EntryPoints, SiteCode, UserCode
from stratagem.worker.user_code.watching import changed_modules

if TYPE_CHECKING:  # the asynchronous stubs exist only for type checkers
    from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub


MAX_SAID: Final = 1000
"""The number of warnings about changed code that are remembered, so that none is repeated."""


class SessionKey(NamedTuple):
    """The key of a session: run, party, and member of the party."""

    run_id: str
    party: str
    member: int


@dataclass(frozen=True, slots=True)
class Host:
    """The resources of this process. Calls to the coordinator and to workers run on `loop`."""

    worker_id: str
    incarnation: str
    address: str
    device: torch.device
    user_code: UserCode
    local_data: Mapping[str, str]
    data_roots: tuple[Path, ...]
    exchange_timeout_s: float
    compile_timeout_s: float
    mesh: MeshOffer
    activations: ActivationStore
    hub: PeerHub
    coordinator: "CoordinatorServiceAsyncStub"
    blobs: ReceivedBlobs
    thread: TorchThread
    loop: asyncio.AbstractEventLoop
    last_words: LastWords
    privacy_secret: PrivacySecret
    """The secret that protects rows that are only on this worker."""
    site: SiteGate | None = None
    """Decides by the site's file which plans are accepted; None without such a file."""
    clock: CoordinatorClock = field(default_factory=CoordinatorClock)
    stats: WorkStats = field(default_factory=WorkStats)
    said_changes: dict[tuple[str, str], None] = field(default_factory=dict)
    """(run, module) of each warning about changed code; oldest first. For the torch thread."""
    secure: SecureRounds = field(
        default_factory=lambda: SecureRounds(SecretStore(None), WorkerSigner())
    )
    """The secrets of secure aggregation, used from any thread."""
    readers: WorkerReaders = field(default_factory=lambda: WorkerReaders(0))
    """The processes that read rows. Used by the torch thread."""
    client_states: ClientStateStore | None = None
    """The private states of federated clients; None if the worker has no data folder."""
    build_dir: Path | None = None
    """The folder for files of a model that is being built; None to build it in memory."""
    health: DeviceHealth = field(default_factory=DeviceHealth)
    kept: KeptReplicas = field(default_factory=KeptReplicas)
    """The parts of commits of which this worker has the only copy."""
    states: DirectStates | None = None
    """The coordinator's folder of states; None if this worker does not see it."""
    objects: SignedObjects | None = None
    """The client for requests signed by the coordinator; None if this worker makes none."""

    def signed_objects(self) -> SignedObjects:
        """Return the client of signed requests. Raises PermissionDeniedError without one."""
        if self.objects is None:
            raise PermissionDeniedError("this worker takes no signed requests")
        return self.objects


@dataclass(slots=True)
class SessionState:
    """The state that a session keeps between its plans. Used only in the torch thread."""

    trainer: MemberTrainer[Any] | None = None
    exchange: Exchange | None = None
    """The exchange of the trainer's steps; None between memberships."""
    membership: int = -1
    """The number of the set of members with which `exchange` was formed."""
    inference: tuple[str, Inference] | None = None
    """(digests of the loaded state, the model that has this state for evaluation), or None."""
    data_version: str = ""
    """The version of the site's data that the model in `inference` evaluates."""
    lineage: int = 0
    """Rises when the party begins from a given state; states of earlier lineages are dropped."""
    spent: int = -1
    """The highest membership whose rendezvous is over; it cannot be repeated."""
    tally: Tally = field(default_factory=Tally)
    recorder: Recorder | None = None
    """Records the steps counted in the tally; sent to other members together with the tally."""
    own_recorders: dict[str, Recorder] = field(default_factory=dict)
    """Records that only this member has, keyed by node or stage; "" for the whole party."""
    shown_step: int = -1
    """The latest step for which this session has called on_step."""
    answer: StepAnswer = NO_ANSWER
    """The answer of on_step for `shown_step`."""
    activity: str = ""
    divided_at: int = -1
    """The membership whose members hold the slices of the present state."""
    kept_slices: KeptSlices | None = None
    """The slices of the previous division, kept until all members have divided the state again."""
    infinite: Masks = field(default_factory=dict)
    """Masks of elements that were not finite in the initial state; computed on demand."""
    late: list[StepReport] = field(default_factory=list)
    """Reports of steps that were finished between two memberships, not yet in the tally."""
    is_offering: bool = False
    """True if a copy of the state is offered to members that are behind (healing)."""

    def joined(self, membership: int) -> Joined | None:
        """Return trainer and exchange if they are connected under this membership, else None."""
        if self.trainer is None or self.exchange is None or self.membership != membership:
            return None
        return Joined(self.trainer, self.exchange)

    @property
    def applied_step(self) -> int | None:
        """The number of steps applied to the state; None without a state."""
        return None if self.trainer is None else self.trainer.step

    def begin(self, lineage: int, segment: int) -> None:
        """Begin a plan of this lineage and segment; drop the state of an earlier lineage."""
        if self.lineage != lineage:
            # The party begins from another state, perhaps with other hyperparameters.
            self.drop()
            self.lineage = lineage
        if self.tally.segment != segment:
            self.begin_sums(segment)
            self.answer, self.late = NO_ANSWER, []

    def begin_sums(self, segment: int) -> None:
        """Begin a segment at its first step, with empty sums and records."""
        self.tally, self.recorder, self.own_recorders = Tally(segment), None, {}

    def leave(self) -> None:
        """Close the exchange, since the session leaves its membership."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.cut()
            exchange.close()

    def drop(self) -> None:
        """Close the exchange, and drop the state."""
        self.leave()
        self.trainer, self.inference = None, None
        self.late, self.kept_slices, self.infinite = [], None, {}
        self.begin_sums(-1)
        self.shown_step, self.answer = -1, NO_ANSWER


@dataclass(slots=True)
class RunCache:
    """The cache that the sessions of a run share. Used only in the torch thread."""

    clients: OrderedDict[str, ClientRunner] = field(default_factory=OrderedDict)
    """The runners of federated clients, keyed by job as JSON."""


@dataclass(frozen=True, slots=True)
class ExecutionContext:
    """One execution as its plan sees it: the context of all its work."""

    host: Host
    key: SessionKey
    holding: SessionState
    run_cache: RunCache
    states: StateStore
    gradients: GradientPort
    control: Control
    outbox: Outbox
    job: JobSpec
    segment: int
    request: pb.ExecuteRequest
    admission: SiteAdmission | None = None
    """The site's admission of the plan; None if there is no site's file."""
    traceparent: str = ""
    """The trace context of the call that began the execution."""

    @property
    def exchange_timeout_s(self) -> float:
        """Return the longest wait for another member inside a step.

        Any step may compile new code for the first batch of a shape, which takes minutes on a busy
        machine. A dead or frozen member is detected by its connections and its lease, so only a cut
        between living workers is detected later. Replicas wait for each other only after their
        local steps, so each of these adds to the wait.
        """
        compiles = self.job.execution.mode != "Eager"
        timeout_s = self.host.exchange_timeout_s * (local_steps_of(self.job.strategy) or 1)
        return timeout_s + (self.host.compile_timeout_s if compiles else 0.0)

    @property
    def numerics(self) -> int:
        """Return the version of the rules that decide the bits; see common.numerics.rules."""
        return check_numerics(self.request.numerics)

    @property
    def data_version(self) -> str:
        """Return the present version of the site's data; "" without a site's file."""
        return "" if self.admission is None else self.admission.data_version

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Let the event loop make this call, after all earlier ones."""
        self.host.loop.call_soon_threadsafe(call, *arguments)

    def set_activity(self, activity: str) -> None:
        """Set the activity that is shown to users and named in errors."""
        self.holding.activity = activity
        self.post(self.outbox.set_activity, activity)

    def warn(self, notes: Iterable[str]) -> None:
        """Write sentences to the run's log, as warnings."""
        for text in notes:
            line = pb.LogLine(
                worker_id=self.host.worker_id, time_s=time.time(), level="WARNING", text=text
            )
            self.post(self.outbox.log, line)

    def warn_of_changed_code(self) -> None:
        """Warn once in the run's log about modules whose files have changed since their import."""
        run_id, said = self.key.run_id, self.host.said_changes
        for name, path in changed_modules():
            if (run_id, name) in said:
                continue
            said[run_id, name] = None
            while len(said) > MAX_SAID:
                said.pop(next(iter(said)))
            self.warn(
                [
                    f"{path} has changed since this worker has imported {name}, which runs as it "
                    "was: start the worker anew, or send the files with the job (code: .)"
                ]
            )

    def blob(self, digest: str) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
        """Wait for a blob; return its tensors, which must not be changed, and metadata."""
        blobs, run_id, who = self.host.blobs, self.key.run_id, object()
        self.post(blobs.want, run_id, digest, who)
        try:
            return self.control.wait_for_caller(self._fetch(digest)).load()
        finally:
            self.post(blobs.release, run_id, who)

    def base_state(self, base: pb.StateRef) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
        """Wait for the initial state of a plan; return its tensors and metadata.

        A state made by federated aggregation has no step, and gets that of the plan.
        """
        tensors, metadata = self.blob(base.digest)
        return tensors, state_metadata(base.step, metadata)

    async def _fetch(self, digest: str) -> Blob:
        blobs, run_id = self.host.blobs, self.key.run_id
        is_here = blobs.find(run_id, digest) is not None
        if not is_here and self.host.states is not None:
            is_here = await self.host.states.read(blobs, run_id, digest, self.request.fence.term)
        if not is_here:
            self.outbox.need(digest, was_here=blobs.was_dropped(run_id, digest))
        try:
            return await blobs.get(run_id, digest)
        finally:
            self.outbox.has(digest)

    @property
    def entrypoints(self) -> EntryPoints:
        """Return the entry points of the job, after its code has been fetched."""
        admitted = self.admission
        allowed = None if admitted is None else SiteCode(admitted.site, admitted.entrypoints)
        code = self.host.user_code
        return code.entry_points_of(self.job, self.key.run_id, self._archive, allowed)

    def _archive(self, digest: str) -> bytes:
        tensor = self.blob(digest)[0].get(bundle.TENSOR)
        if tensor is None or tensor.dtype is not torch.uint8:
            raise InvalidInputError.at("code.digest", f"{digest} is no bundle")
        return tensor.numpy().tobytes()

    def sources(self) -> DataSources:
        """Return the data that the job may name, the caller's own included."""
        inline = self.job.data.inline
        tensors = None if inline is None else self.blob(inline)[0]
        return DataSources(
            self.host.local_data,
            {} if self.admission is None else self.admission.data,
            inline=tensors,
            readers=self.readers(),
            known_rows=self.request.known_rows,
            roots=self.host.data_roots,
        )

    def readers(self) -> ReaderPool | None:
        """Return the processes that read rows for this run; None if the torch thread reads them."""
        return self.host.readers.of(self.key.run_id, self.job, self.entrypoints)

    def new_trainer(
        self, share: StateShare | None = None, *, fresh: bool, folder: Path | None = None
    ) -> Trainer:
        """Build a trainer of the job, initialised (fresh) or waiting for a state to be loaded.

        share: the slice of the optimizer's state to keep; None for all. folder: the folder of files
        that hold the model instead of memory.
        """
        trainer = build_trainer(
            self.job,
            self.entrypoints,
            share,
            device=self.host.device,
            fresh=fresh,
            sources=self.sources(),
            numerics=self.numerics,
            folder=folder,
        )
        self.warn(trainer.setup.notes)
        return trainer

    def new_inference(self, *, fresh: bool, folder: Path | None = None) -> Inference:
        """Build a model of the job for inference, initialised (fresh) or to be loaded. folder: as
        for `new_trainer`."""
        inference = build_inference(
            self.job,
            self.entrypoints,
            device=self.host.device,
            fresh=fresh,
            sources=self.sources(),
            numerics=self.numerics,
            folder=folder,
        )
        self.warn(inference.setup.notes)
        return inference

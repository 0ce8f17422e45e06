"""The host of a worker's sessions: what its settings have it keep, where, and whom it reaches."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from stratagem.common.base.ids import new_incarnation
from stratagem.common.privacy.noise import PrivacySecret
from stratagem.common.rpc.channel import Proof
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.common.tensors.leaves import StateFolder
from stratagem.common.tensors.local_files import leave_place
from stratagem.common.tensors.manifest import Limits
from stratagem.worker.data.reader.worker_readers import WorkerReaders
from stratagem.worker.host.client_state_store import ClientStateStore
from stratagem.worker.host.coordinator_clock import CoordinatorClock
from stratagem.worker.host.direct_states import DirectStates
from stratagem.worker.host.exit_record import LastWords
from stratagem.worker.host.torch_thread import TorchThread
from stratagem.worker.host.worker_blob_cache import ReceivedBlobs
from stratagem.worker.mesh.backend_agreement import MeshOffer
from stratagem.worker.mesh.peer_service import PeerHub
from stratagem.worker.pipeline.activation_store import ActivationStore
from stratagem.worker.process.worker_security import WorkerSecurity
from stratagem.worker.process.worker_settings import WorkerSettings
from stratagem.worker.secure_aggregation.secret_store import SecretStore
from stratagem.worker.secure_aggregation.secure_rounds import SecureRounds
from stratagem.worker.secure_aggregation.signing import WorkerSigner
from stratagem.worker.session.context import Host
from stratagem.worker.session.kept_replicas import KeptReplicas
from stratagem.worker.site.site_gate import SiteGate
from stratagem.worker.user_code.code_policy import CodePolicy
from stratagem.worker.user_code.code_store import CodeStore
from stratagem.worker.user_code.entrypoints import EntryPoints
from stratagem.worker.user_code.job_code import UserCode

if TYPE_CHECKING:  # the stubs' asynchronous side exists for type checkers only
    from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

NO_SECRET: Final = (
    "rows that lie on this worker are protected by a secret that stays here: start it with "
    "--data-dir, where one is made, or with --privacy-secret FILE"
)


@dataclass(frozen=True, slots=True)
class Reach:
    """The address of this process, its proof of identity, its stub of the coordinator, and whether
    the network between workers is "trusted" or protected by "tls"."""

    address: str
    proof: Proof
    coordinator: "CoordinatorServiceAsyncStub"
    data_plane: str


def host_of(
    settings: WorkerSettings,
    thread: TorchThread,
    mesh: MeshOffer,
    reach: Reach,
    site: SiteGate | None,
    secure: SecureRounds,
) -> Host:
    """Return the host of all sessions of this process, as a new incarnation."""
    incarnation = new_incarnation()
    if not settings.open_files:
        leave_place()
    last_words = LastWords(
        settings.data_dir, settings.worker_id, incarnation, settings.previous_exit
    )
    if site is not None and not site.shares_logs:
        del last_words.previous.last_lines[:]
    return Host(
        worker_id=settings.worker_id,
        incarnation=incarnation,
        address=reach.address,
        device=torch.device(settings.device),
        user_code=_user_code(settings),
        local_data=settings.local_data,
        data_roots=settings.data_roots,
        exchange_timeout_s=settings.exchange_timeout_s,
        compile_timeout_s=settings.compile_timeout_s,
        mesh=mesh,
        activations=ActivationStore(settings.activation_store),
        hub=PeerHub(reach.address, reach.proof, max_early_bytes=settings.max_early_bytes),
        coordinator=reach.coordinator,
        blobs=ReceivedBlobs(
            settings.data_dir,
            settings.max_blob_memory_bytes,
            worker_id=settings.worker_id,
            max_uploads=settings.max_uploads,
        ),
        thread=thread,
        loop=asyncio.get_running_loop(),
        last_words=last_words,
        privacy_secret=_privacy_secret(settings),
        site=site,
        clock=CoordinatorClock(),
        secure=secure,
        readers=WorkerReaders(settings.max_readers),
        client_states=_client_states(settings),
        build_dir=settings.build_dir,
        kept=KeptReplicas(settings.data_dir and settings.data_dir / f"kept-{settings.worker_id}"),
        states=_states(settings),
        objects=_objects(settings, reach.data_plane),
    )


def _states(settings: WorkerSettings) -> DirectStates | None:
    if settings.state_folder is None:
        return None
    limits = Limits(
        max_tensors=settings.max_state_tensors, max_total_bytes=settings.max_state_bytes
    )
    return DirectStates(StateFolder(settings.state_folder), limits)


def _objects(settings: WorkerSettings, data_plane: str) -> SignedObjects | None:
    """Return what carries out signed requests; None for a site, whose states go through the
    coordinator alone."""
    if not settings.takes_signed_requests:
        return None
    return SignedObjects(allows_http=data_plane == "trusted")


def _privacy_secret(settings: WorkerSettings) -> PrivacySecret:
    if settings.privacy_secret is not None or settings.data_dir is None:
        return PrivacySecret(settings.privacy_secret, missing=NO_SECRET)
    own = settings.data_dir / f"privacy-secret-{settings.worker_id}"
    return PrivacySecret(own, may_make=True)


def _client_states(settings: WorkerSettings) -> ClientStateStore | None:
    if settings.data_dir is None:
        return None
    folder = settings.data_dir / f"clients-{settings.worker_id}"
    return ClientStateStore(folder, settings.worker_id)


def secure_rounds_of(
    settings: WorkerSettings, security: WorkerSecurity, site: SiteGate | None
) -> SecureRounds:
    folder = settings.data_dir and settings.data_dir / f"secure-{settings.worker_id}"
    signer = WorkerSigner(security.proof.tls, security.revoked)
    return SecureRounds(SecretStore(folder), signer, site)


def _user_code(settings: WorkerSettings) -> UserCode:
    installed = EntryPoints(tuple(settings.allow), tuple(settings.import_path))
    folder = settings.data_dir and settings.data_dir / f"code-{settings.worker_id}"
    return UserCode(installed, CodePolicy(settings.allow_code), CodeStore(folder))

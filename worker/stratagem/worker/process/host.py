"""Make the `Host` that all sessions of a worker share: its security, storage and capability."""

import asyncio
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc.aio
import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import new_incarnation
from stratagem.common.base.text import is_loopback, split_address
from stratagem.common.identity.callers import Authorizer, RevokedFile
from stratagem.common.identity.tls import Role, TlsFiles, tls_files
from stratagem.common.numerics import rules
from stratagem.common.privacy.noise import PrivacySecret
from stratagem.common.rpc.channel import Proof, split_addresses
from stratagem.common.rpc.server import bind, bind_socket, bind_tls
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.common.rpc.streams import SocketFolder
from stratagem.common.tensors.leaves import StateFolder
from stratagem.common.tensors.local_files import leave_place
from stratagem.common.tensors.manifest import Limits
from stratagem.v1 import types_pb2
from stratagem.worker.data.readers import WorkerReaders
from stratagem.worker.federated.secure_rounds import SecureRounds
from stratagem.worker.federated.secure_secrets import SecretStore, WorkerSigner
from stratagem.worker.host.blobs import ReceivedBlobs
from stratagem.worker.host.client_states import ClientStateStore
from stratagem.worker.host.clock import CoordinatorClock, TorchThread
from stratagem.worker.host.exit_record import LastWords
from stratagem.worker.host.states import DirectStates
from stratagem.worker.mesh.choice import AUTO, MeshOffer
from stratagem.worker.mesh.peers import PeerHub
from stratagem.worker.numerics.randomness import device_name, numerics_fingerprint
from stratagem.worker.pipeline.activation_store import ActivationStore
from stratagem.worker.process.settings import WorkerSettings, advertised
from stratagem.worker.session.context import Host
from stratagem.worker.session.replicas import KeptReplicas
from stratagem.worker.site.gate import SiteGate
from stratagem.worker.user_code.bundles import CodePolicy, CodeStore
from stratagem.worker.user_code.entrypoints import EntryPoints, UserCode

if TYPE_CHECKING:
    from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

# ---- Worker security ----
#
# Without certificates everything is in plaintext, on loopback unless the operator allows more. With
# them the worker's name must be the one in its certificate, or of the pool in it, and unless the
# operator trusts the network between workers (`--data-plane trusted`) they exchange tensors only
# over gRPC, the one engine that TLS protects.


class WorkerSecurity:
    """Identity, gate and engines of one process. Raises InvalidInputError for unfit settings."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        tls = tls_files(settings.tls_ca, settings.tls_cert, settings.tls_key, needs_cert=True)
        self.proof = Proof(tls)
        if settings.revoked_file is not None and tls is None:
            raise InvalidInputError.at("revoked_file", "needs --tls-ca, --tls-cert and --tls-key")
        self.revoked = None if settings.revoked_file is None else RevokedFile(settings.revoked_file)
        self.gate = Authorizer(_trust_domain(tls, settings.worker_id), revoked=self.revoked)
        self.data_plane = settings.data_plane or ("trusted" if tls is None else "tls")
        if self.data_plane == "tls" and tls is None:
            raise InvalidInputError.at("data_plane", "tls needs --tls-ca, --tls-cert, --tls-key")
        if self.data_plane == "tls" and settings.state_folder is not None:
            text = "all who see it can read all states; it needs --data-plane trusted"
            raise InvalidInputError.at("state_folder", text)

    @property
    def mesh(self) -> str:
        """The operator's engine between workers; "grpc" if TLS requires that."""
        wish = self._settings.mesh
        if self.data_plane == "trusted":
            return wish
        if wish not in (AUTO, "grpc"):
            message = f"{wish} encrypts nothing; use grpc, or --data-plane trusted"
            raise InvalidInputError.at("mesh", message)
        return "grpc"

    def listen(self, server: grpc.aio.Server, sockets: SocketFolder) -> str:
        """Bind the service; return HOST:PORT for other workers.

        A tunnelled worker returns "", since nobody dials it, and serves at `server_socket` of the
        folder.
        """
        if not self._settings.tunnel:
            return advertised(self._settings, self._listen(server))
        self._check_tunnel()
        bind_socket(server, server_socket(sockets), self.proof.tls)
        return ""

    def _check_tunnel(self) -> None:
        """Raise InvalidInputError for a plaintext tunnel through an untrusted network."""
        for address in split_addresses(self._settings.coordinator):
            host, _ = split_address(address)
            is_safe = self.proof.tls is not None or is_loopback(host)
            if not is_safe and not self._settings.allow_insecure_network:
                raise InvalidInputError.at(
                    "tunnel",
                    f"{address} is on another machine, and nothing would be encrypted or "
                    f"authenticated; give certificates (--tls-ca, --tls-cert, --tls-key), or "
                    f"allow the insecure network explicitly",
                )

    def _listen(self, server: grpc.aio.Server) -> int:
        host, port = split_address(self._settings.listen)
        if self.proof.tls is not None:
            return bind_tls(server, host, port, self.proof.tls)
        allowed = self._settings.allow_insecure_network
        return bind(server, host, port, allow_insecure_network=allowed)

    def listen_for_probes(self, server: grpc.aio.Server, port: int) -> str:
        """Bind the health service, always in plaintext; return its host:port."""
        host, _ = split_address(self._settings.listen)
        allowed = self._settings.may_serve_plaintext
        return f"{host}:{bind(server, host, port, allow_insecure_network=allowed)}"


def server_socket(sockets: SocketFolder) -> str:
    """Return the path of a tunnelled worker's server socket."""
    return sockets.path("server.sock")


def _trust_domain(tls: TlsFiles | None, name: str) -> str:
    if tls is None:
        return ""
    identity = tls.identity()
    if identity.role is not Role.WORKER or not identity.covers(name):
        message = (
            f"{tls.cert} is of {identity}; it must be of worker {name}, as --name and --pool say"
        )
        raise InvalidInputError.at("tls_cert", message)
    return identity.trust_domain


# ---- Host of sessions ----

NO_SECRET: Final = (
    "rows that lie on this worker are protected by a secret that stays here: start it with "
    "--data-dir, where one is made, or with --privacy-secret FILE"
)


@dataclass(frozen=True, slots=True)
class Reach:
    """The network identity of this process: address, proof of identity, coordinator stub, and
    whether the network between workers is "trusted" or protected by "tls"."""

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
    """Make the host of all sessions of this process, with a new incarnation."""
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
    """Return the client that reads and writes the object store by presigned URLs; None for a
    worker with a site file, which sends its states only through the coordinator."""
    if not settings.takes_signed_requests:
        return None
    return SignedObjects(allows_http=data_plane == "trusted")


def _privacy_secret(settings: WorkerSettings) -> PrivacySecret:
    if settings.privacy_secret is not None or settings.data_dir is None:
        return PrivacySecret(settings.privacy_secret, missing=NO_SECRET)
    path = settings.data_dir / f"privacy-secret-{settings.worker_id}"
    return PrivacySecret(path, may_make=True)


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


# ---- Capability ----
#
# The coordinator places work by the facts about device, memory and numerics. They are read in the
# torch thread, whose thread count is part of the numerics.


def device_of(name: str) -> torch.device:
    """Return the device of this name. Raises InvalidInputError if it does not exist."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise InvalidInputError.at("--device", f"{name!r} is not cpu or cuda:N")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.backends.cuda.is_built():
        lack = f"torch {torch.__version__} is built without CUDA; install one with it"
        raise InvalidInputError.at("--device", f"{name}: {lack}, or use --device cpu")
    num_devices = torch.cuda.device_count()
    if (device.index or 0) >= num_devices:
        devices = ", ".join(f"cuda:{number}" for number in range(num_devices)) or "none"
        raise InvalidInputError.at(
            "--device", f"{name} is not there; CUDA devices of this machine: {devices}"
        )
    return device


def capability_of(
    device: torch.device, local_data: Iterable[str], tags: Iterable[str]
) -> types_pb2.Capability:
    """Return the capability to report, which depends on the device and the calling thread."""
    fingerprint, description = numerics_fingerprint(device)
    return types_pb2.Capability(
        device=str(device),
        device_name=device_name(device),
        memory_bytes=_memory_bytes(device),
        num_threads=torch.get_num_threads(),
        numerics_fingerprint=fingerprint,
        numerics_description=description,
        local_data=sorted(local_data),
        tags=sorted(set(tags)),
        numerics_rules=rules.CURRENT,
    )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

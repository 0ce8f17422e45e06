"""Open the storage of blobs and updates, in local folders or an object store, and the listeners.

The storage is opened before the lead is taken, so wrong keys are found when a standby starts and
not when it must take over. Later operations of the stores are bound to the term of the lead.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import grpc.aio
import structlog

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import is_loopback, split_address
from stratagem.common.identity.callers import Authorizer, RevokedFile, TokenBook
from stratagem.common.identity.tls import Role, TlsFiles, tls_files
from stratagem.common.rpc.server import bind, bind_tls
from stratagem.common.tensors.manifest import Limits
from stratagem.coordinator.runtime.settings import Settings
from stratagem.coordinator.store.blobs import BlobStore, DirectoryBlobs
from stratagem.coordinator.store.bucket import SETTING, Objects, open_s3
from stratagem.coordinator.store.files import MakeRoom, no_room
from stratagem.coordinator.store.leaves import LISTS, LeafBlobs, in_folder, in_objects
from stratagem.coordinator.store.shared_blobs import BlobCache, SharedBlobs, default_limit_bytes
from stratagem.coordinator.updates.spool import SharedSpool, Spool

# ---- Listeners ----
#
# With certificates, `--listen` asks every caller for one, and `--token-listen` for a token
# instead. Without them everything is in plaintext and no caller proves its identity, so only
# loopback is bound unless the operator allows more. Health is always in plaintext: it says
# nothing but SERVING.

log = structlog.get_logger()


class CoordinatorSecurity:
    """The TLS files, tokens and revocations from the settings, and the listeners that use them.
    Raises InvalidInputError if the settings contradict each other."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.tls = tls_of(settings)
        self._check_tokens()
        tokens = None if settings.tokens_file is None else TokenBook(settings.tokens_file)
        if settings.revoked_file is not None and self.tls is None:
            raise InvalidInputError.at("revoked_file", "needs --tls-ca, --tls-cert and --tls-key")
        revoked = None if settings.revoked_file is None else RevokedFile(settings.revoked_file)
        self.gate = Authorizer(_trust_domain(self.tls), tokens, revoked)

    def listen(self, server: grpc.aio.Server) -> str:
        """Bind the listeners of the service, and return the host:port of the main one."""
        settings = self._settings
        host, port = host_and_port("listen", settings.listen)
        if self.tls is None:
            allowed = settings.allow_insecure_network
            return f"{host}:{bind(server, host, port, allow_insecure_network=allowed)}"
        if settings.token_listen:
            self._listen_for_tokens(server, self.tls)
        return f"{host}:{bind_tls(server, host, port, self.tls)}"

    def listen_for_probes(self, server: grpc.aio.Server) -> int:
        """Bind the listener of the health service, and return its port."""
        host, _ = host_and_port("listen", self._settings.listen)
        allowed = self._settings.may_serve_plaintext
        return bind(server, host, self._settings.health_port, allow_insecure_network=allowed)

    def _listen_for_tokens(self, server: grpc.aio.Server, tls: TlsFiles) -> None:
        host, port = host_and_port("token_listen", self._settings.token_listen)
        bound = bind_tls(server, host, port, tls, asks_for_certificate=False)
        log.info("people with tokens are served", address=f"{host}:{bound}")

    def _check_tokens(self) -> None:
        settings = self._settings
        if settings.token_listen and (self.tls is None or settings.tokens_file is None):
            message = "needs --tokens-file, --tls-ca, --tls-cert and --tls-key"
            raise InvalidInputError.at("token_listen", message)
        if settings.tokens_file is None:
            return
        host, _ = host_and_port("listen", settings.listen)
        if self.tls is None and not is_loopback(host):
            raise InvalidInputError.at(
                "tokens_file", f"tokens would come to {host} in plaintext; give certificates"
            )
        if self.tls is not None and not settings.token_listen:
            message = f"needs --token-listen: {settings.listen} asks everybody for a certificate"
            raise InvalidInputError.at("tokens_file", message)


def tls_of(settings: Settings) -> TlsFiles | None:
    """Return the TLS certificate files that the settings name; None without TLS."""
    return tls_files(settings.tls_ca, settings.tls_cert, settings.tls_key, needs_cert=True)


def host_and_port(name: str, address: str) -> tuple[str, int]:
    """Split HOST:PORT into both parts. Raises InvalidInputError, naming the setting."""
    try:
        return split_address(address)
    except ValueError as error:
        raise InvalidInputError.at(name, str(error)) from None


def _trust_domain(tls: TlsFiles | None) -> str:
    if tls is None:
        return ""
    identity = tls.identity()
    if identity.role is not Role.COORDINATOR:
        message = f"{tls.cert} is of {identity}; the role must be {Role.COORDINATOR}"
        raise InvalidInputError.at("tls_cert", message)
    return identity.trust_domain


# ---- Storage ----

FOLDER: Final = "states"
"""The folder, below the data folder, of states that are stored in leaves."""
_OWNER: Final = "journal"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage of blobs and spooled updates; objects: None if all is stored below data_dir."""

    data_dir: Path
    objects: Objects | None
    cache_bytes: int | None
    """Limit of the local cache; None: derived from the size of the disk."""
    spool_bytes: int
    writes_leaves: bool
    """True if new states are stored in leaves; states in leaves can be read in any case."""
    limits: Limits
    """The limits on the size of a state."""

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Open the storage that the settings name. Raises InvalidInputError, with a remedy, if an
        object store cannot be used."""
        writes_leaves, objects = settings.state_path == "direct", None
        if settings.blob_store:
            objects = open_s3(settings.blob_store, os.environ, signs=writes_leaves)
        if objects is not None:
            _log.info("blobs and updates are in an object store", url=objects.url)
        data_dir = settings.data_dir
        return cls(
            data_dir,
            objects,
            settings.blob_cache_bytes,
            settings.max_spool_bytes,
            writes_leaves,
            Limits(
                max_tensors=settings.max_state_tensors, max_total_bytes=settings.max_state_bytes
            ),
        )

    def claim(self, journal: str) -> None:
        """Mark the object store as belonging to a journal.

        Raises InvalidInputError if it belongs to another journal, whose blobs would be deleted.
        """
        if self.objects is None:
            return
        mine = f"{_OWNER}/{journal}"
        names = {stored.name for stored in self.objects.list(_OWNER)}
        if others := sorted(names - {mine}):
            raise InvalidInputError.at(
                SETTING,
                f"{self.objects.url} holds the states of another journal ({others[0]}); name "
                "another prefix. If that journal is gone for good, delete all below this prefix",
            )
        if mine not in names:
            self.objects.put(mine, [b""], 0)

    def blobs(self, term: int) -> BlobStore:
        """Return the blob store for a coordinator that leads under this leadership term."""
        if self.writes_leaves or self._has_leaves():
            return self.leaves(term)
        return self._whole(term)

    def leaves(self, term: int) -> LeafBlobs:
        """Return the blob store that supports states in leaves, for this leadership term."""
        whole = self._whole(term)
        if self.objects is not None and isinstance(whole, SharedBlobs):
            place = in_objects(self.objects, whole, self.data_dir / "list-cache", term)
        else:
            place = in_folder(self.data_dir / FOLDER)
        return LeafBlobs(whole, place, term, writes_leaves=self.writes_leaves, limits=self.limits)

    def _has_leaves(self) -> bool:
        if self.objects is None:
            return (self.data_dir / FOLDER).is_dir()
        return bool(self.objects.list(LISTS))

    def _whole(self, term: int) -> DirectoryBlobs | SharedBlobs:
        if self.objects is None:
            return DirectoryBlobs(self.data_dir / "blobs")
        limit_bytes = self.cache_bytes or default_limit_bytes(self.data_dir)
        cache = BlobCache(self.data_dir / "blob-cache", limit_bytes)
        return SharedBlobs(self.objects, cache, term)

    def spool(self, term: int, make_room: MakeRoom = no_room) -> Spool:
        """Return the spool of updates of open rounds, for this leadership term; make_room: frees
        space among the blobs on the same disk."""
        shared = SharedSpool(self.objects, term) if self.objects is not None else None
        return Spool(
            self.data_dir / "spool",
            quota_bytes=self.spool_bytes,
            shared=shared,
            make_room=make_room,
        )

"""gRPC's credentials, made of files that may be replaced while the process runs.

The only place that makes them, for servers and for channels. gRPC can make a listener ask for a
client's certificate and insist on it, or not ask at all; there is nothing between. So one listener
takes certificates, and people with tokens use another.
"""

import threading
from typing import Any

import grpc
import structlog

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.files.watched_file import WatchedFiles
from stratagem.common.identity.tls_files import Material, TlsFiles

log = structlog.get_logger()


class FreshFiles:
    """The newest content of the files that could be used; safe to ask from any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """InvalidInputError when the files cannot be used now."""
        self._files = files
        self._lock = threading.Lock()
        self._watched = WatchedFiles(
            files.paths, files.read, unusable="new certificates cannot be used yet"
        )
        self._has_warned = False
        self._warn_if_expired()

    @property
    def material(self) -> Material:
        return self._watched.content

    def changed(self) -> bool:
        """Look at the files; whether there is other material than at the last call.

        Files that do not fit together, such as a new certificate with its old key, are looked at
        again when they change again; until then the old content is used.
        """
        with self._lock:
            self._warn_if_expired()
            before = self.material
            if not self._watched.renewed() or self.material == before:
                return False
            self._has_warned = False
            log.info(
                "certificates read again",
                expires=_when(self.material),
                is_=str(self.material.cert_id),
            )
            return True

    def _warn_if_expired(self) -> None:
        problem = "" if self._has_warned else self.material.problem
        if problem:
            self._has_warned = True
            log.warning(
                "this process's certificate has expired: no new connection can be made",
                reason=problem,
                file=str(self._files.cert),
                expired=_when(self.material),
            )


def server_credentials(files: TlsFiles, *, asks_for_certificate: bool) -> grpc.ServerCredentials:
    """Return the credentials of a listener; each handshake sees the newest files.

    asks_for_certificate: callers must have a certificate of the same CA. Otherwise they are not
    asked for one, and what they may do depends on their token.
    """
    fresh = FreshFiles(files)

    def configuration() -> grpc.ServerCertificateConfiguration:
        material = fresh.material
        if material.key is None or material.cert is None:
            raise InvalidInputError.at("tls_cert", "is needed: a server must prove who it is")
        pair = (material.key, material.cert)
        root = material.ca if asks_for_certificate else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=root)

    def newest() -> Any:
        return configuration() if fresh.changed() else None  # None: as before

    return grpc.dynamic_ssl_server_credentials(configuration(), newest, asks_for_certificate)


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Return the credentials of a connection; gRPC reads them once, so a new channel is made when
    files change."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def _when(material: Material) -> str:
    return "" if material.expires is None else material.expires.isoformat()

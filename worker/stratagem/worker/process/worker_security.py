"""The security settings of a worker: its identity, and the protection of what workers exchange.

Without certificates everything is in plaintext, on loopback unless the operator wants more. With
them the worker's name must be the one in its certificate, or of the pool in it, and unless the
operator trusts the network between workers (`--data-plane trusted`) they exchange tensors over gRPC
alone, which is the one engine that TLS protects.
"""

import grpc.aio

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import is_loopback, split_address
from stratagem.common.identity.callers import Authorizer, RevokedFile
from stratagem.common.identity.tls import Role, TlsFiles, tls_files
from stratagem.common.rpc.channel import Proof, split_addresses
from stratagem.common.rpc.server import bind, bind_socket, bind_tls
from stratagem.common.rpc.streams import SocketFolder
from stratagem.worker.mesh.backend_agreement import AUTO
from stratagem.worker.process.worker_settings import WorkerSettings, advertised


class WorkerSecurity:
    """The identity, gate and engine of one process. Raises InvalidInputError for unfit settings."""

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
        """The engine that the operator wants between workers; "grpc" where it must be under TLS."""
        wish = self._settings.mesh
        if self.data_plane == "trusted":
            return wish
        if wish not in (AUTO, "grpc"):
            message = f"{wish} encrypts nothing; use grpc, or --data-plane trusted"
            raise InvalidInputError.at("mesh", message)
        return "grpc"

    def listen(self, server: grpc.aio.Server, sockets: SocketFolder) -> str:
        """Bind the service; return HOST:PORT at which others reach it, or for a tunnelled worker,
        whom nobody dials, "" after binding `server_socket` of the folder."""
        if not self._settings.tunnel:
            return advertised(self._settings, self._listen(server))
        self._check_tunnel()
        bind_socket(server, server_socket(sockets), self.proof.tls)
        return ""

    def _check_tunnel(self) -> None:
        """Refuse a tunnel through a network in plaintext, as a listener would be."""
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
        """Bind the health service, which is always in plaintext; return its host:port."""
        host, _ = split_address(self._settings.listen)
        allowed = self._settings.may_serve_plaintext
        return f"{host}:{bind(server, host, port, allow_insecure_network=allowed)}"


def server_socket(sockets: SocketFolder) -> str:
    """Return the path of the socket at which a tunnelled worker serves."""
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

"""The addresses that a coordinator listens on, and the credentials that it asks for on each.

With certificates `--listen` asks every caller for one, and `--token-listen` for a token instead.
Without them everything is in plaintext and no caller proves its identity, so only loopback is bound
unless the operator allows more. Health is always in plaintext: it says nothing but SERVING.
"""

import grpc.aio
import structlog

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import is_loopback, split_address
from stratagem.common.identity.callers import Authorizer, RevokedFile, TokenBook
from stratagem.common.identity.tls import Role, TlsFiles, tls_files
from stratagem.common.rpc.server import bind, bind_tls
from stratagem.coordinator.runtime.settings import Settings

log = structlog.get_logger()


class CoordinatorSecurity:
    """The TLS files, tokens and revocations of the settings; InvalidInputError if they contradict
    each other."""

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
        """Bind the service and return the host:port to give to others."""
        settings = self._settings
        host, port = host_and_port("listen", settings.listen)
        if self.tls is None:
            allowed = settings.allow_insecure_network
            return f"{host}:{bind(server, host, port, allow_insecure_network=allowed)}"
        if settings.token_listen:
            self._listen_for_tokens(server, self.tls)
        return f"{host}:{bind_tls(server, host, port, self.tls)}"

    def listen_for_probes(self, server: grpc.aio.Server) -> int:
        """Bind the health service and return its port."""
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
    """Return the certificate files of the settings, or None without TLS."""
    return tls_files(settings.tls_ca, settings.tls_cert, settings.tls_key, needs_cert=True)


def host_and_port(name: str, address: str) -> tuple[str, int]:
    """Split HOST:PORT into both parts; InvalidInputError names the setting."""
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

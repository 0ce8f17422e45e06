"""Protects the scrape of metrics: TLS, a scraper's certificate, a token.

The files are looked at again at each handshake and each request, so that they can be renewed while
the process runs; what cannot be used is logged, and the old content is used until it is mended.
Knows nothing of HTTP.
"""

import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, Self

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.files.private_file import check_private
from stratagem.common.files.watched_file import WatchedFiles
from stratagem.common.identity.tls_files import DEFAULT_TRUST_DOMAIN, TlsFiles

MIN_TOKEN_CHARS: Final = 16
_SCHEME: Final = b"bearer "


class MetricsSettings(Protocol):
    """The settings of metrics that coordinator and worker share."""

    @property
    def tls_ca(self) -> Path | None: ...
    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def metrics_tls(self) -> bool: ...
    @property
    def metrics_tls_cert(self) -> Path | None: ...
    @property
    def metrics_tls_key(self) -> Path | None: ...
    @property
    def metrics_client_ca(self) -> Path | None: ...
    @property
    def metrics_token_file(self) -> Path | None: ...
    @property
    def metrics_deployment(self) -> str: ...


def deployment_of(settings: MetricsSettings) -> str:
    """Return the deployment that the metrics are of: as it is set, else the certificate's trust
    domain."""
    if settings.metrics_deployment:
        return settings.metrics_deployment
    if settings.tls_ca is None or settings.tls_cert is None:
        return DEFAULT_TRUST_DOMAIN
    files = TlsFiles(settings.tls_ca, settings.tls_cert, settings.tls_key)
    return files.identity().trust_domain


@dataclass(frozen=True, slots=True)
class Guard:
    """The files of one endpoint; without any it is plaintext, and open to all who reach it."""

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    """Scrapers must have a certificate that one of these authorities has signed."""
    token_file: Path | None = None
    """Scrapers must send what stands in it, as `Authorization: Bearer`."""

    @classmethod
    def of(cls, settings: MetricsSettings) -> Self:
        """The endpoint has its own certificate, else the process's, unless TLS is switched off.

        Raises InvalidInputError where the settings do not fit together.
        """
        cert, key = settings.metrics_tls_cert, settings.metrics_tls_key
        if (cert is None) != (key is None):
            missing = "metrics_tls_key" if key is None else "metrics_tls_cert"
            raise InvalidInputError.at(missing, "is needed: certificate and key go together")
        if cert is None and settings.metrics_tls:
            cert, key = settings.tls_cert, settings.tls_key
        if cert is not None and not settings.metrics_tls:
            raise InvalidInputError.at("metrics_tls_cert", "is of no use with --no-metrics-tls")
        if cert is None and settings.metrics_client_ca is not None:
            message = "needs TLS: give --metrics-tls-cert and --metrics-tls-key"
            raise InvalidInputError.at("metrics_client_ca", message)
        return cls(cert, key, settings.metrics_client_ca, settings.metrics_token_file)

    @property
    def has_tls(self) -> bool:
        return self.cert is not None

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of a listener; None for plaintext. InvalidInputError names an
        unusable file."""
        if self.cert is None:
            return None
        files = [path for path in (self.cert, self.key, self.client_ca) if path is not None]
        watched = WatchedFiles(
            files, self._read_context, unusable="new files of the metrics cannot be used yet"
        )

        def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            """Called in each handshake, before a certificate is shown."""
            connection.context = watched.newest()

        watched.content.sni_callback = renew
        return watched.content

    def admits(self, head: bytes) -> bool:
        """Return whether the head of a request has the token, where one is required."""
        if self.token_file is None:
            return True
        return any(
            hmac.compare_digest(value.strip()[len(_SCHEME) :].strip(), self.token())
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
            if name.strip().lower() == b"authorization"
            and value.strip().lower().startswith(_SCHEME)
        )

    def token(self) -> bytes:
        """Return the token that scrapers must send. InvalidInputError where the file cannot be
        used."""
        assert self.token_file is not None
        try:
            token = self.token_file.read_bytes().strip()
        except OSError as error:
            raise _unusable("metrics_token_file", self.token_file, error) from None
        if len(token) < MIN_TOKEN_CHARS:
            reason = f"has {len(token)} characters, and must have at least {MIN_TOKEN_CHARS}"
            raise _unusable("metrics_token_file", self.token_file, reason)
        return token

    def _read_context(self) -> ssl.SSLContext:
        assert self.cert is not None
        assert self.key is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # of which ssl.SSLError is one
            both = f"{self.cert} and {self.key}"
            raise _unusable("metrics_tls_cert", both, error) from None
        check_private("metrics_tls_key", self.key)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise _unusable("metrics_client_ca", self.client_ca, error) from None
        return context


PLAIN: Final = Guard()


def _no_password() -> str:
    raise ValueError("the key has a password, which no one can type here")


def _unusable(field: str, file: object, reason: object) -> InvalidInputError:
    if isinstance(reason, OSError):
        reason = reason.strerror or reason
    return InvalidInputError.at(field, f"{file}: {reason}")

"""Read the certificates of a process, notice when their files have changed, and make gRPC's
credentials.

    spiffe://<trust domain>/role/<role>/<id>     URI in the certificate: who its holder is
    spiffe://<trust domain>/role/pool/<pool>     of each worker whose id is <label>.<pool>
    <id>.worker.<trust domain>                   DNS names of a worker, which is known by its name
    worker.<trust domain>                        and not by its address

Files that do not fit together are not used.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
import structlog

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.files import WatchedFiles, check_private
from stratagem.common.base.text import plainly

if TYPE_CHECKING:
    from cryptography import x509

# ---- Certificate chains ----
#
# A certificate counts until its own end or that of any authority above it, whichever comes first.
#
# An expired authority invalidates all that it has signed, whatever the certificates say. This
# section reads no file and verifies no peer: gRPC does that.

_MAX_LINKS: Final = 8
AUTHORITY: Final = "authority"
"""The pseudo-role of the holder of a certificate that signs other certificates."""


@dataclass(frozen=True, slots=True)
class ChainCertificate:
    """One certificate of a chain, with the file that it was read from."""

    file: str
    """The path of the file."""
    subject: str
    is_authority: bool
    starts: datetime
    ends: datetime

    @property
    def has_ended(self) -> bool:
        return self.ends <= datetime.now(UTC)

    def __str__(self) -> str:
        if self.is_authority:
            return f"the {AUTHORITY} {self.subject!r} in {self.file}"
        return f"the certificate {self.file}"


Chain = tuple[ChainCertificate, ...]
"""A certificate chain: the holder's certificate first, then each known issuer."""


def chain_of(
    whose: str,
    certificates: Sequence[x509.Certificate],
    ca_file: str,
    authorities: Sequence[x509.Certificate],
) -> Chain:
    """Build the chain of the first certificate. whose: the name, in messages, of the file with the
    certificate and those between it and the authorities."""
    current = certificates[0]
    links = [_link(whose, current, is_authority=False)]
    candidates = [(whose, certificate) for certificate in certificates[1:]]
    candidates += [(ca_file, authority) for authority in authorities]
    while len(links) < _MAX_LINKS and current.issuer != current.subject:
        signers = [(file, signer) for file, signer in candidates if has_signed(signer, current)]
        if not signers:
            break
        # The later end of two certificates for the same key counts, as for a verifier.
        file, current = max(signers, key=lambda signer: signer[1].not_valid_after_utc)
        links.append(_link(file, current, is_authority=True))
    return tuple(links)


def ended(chain: Chain) -> ChainCertificate | None:
    """Return an expired certificate of a chain, or None while all are valid. Of several it is the
    one nearest to the root: new certificates below it would be invalid, too."""
    return next((link for link in reversed(chain) if link.has_ended), None)


def first_to_end(chain: Chain) -> ChainCertificate | None:
    """Return the certificate that expires first; among equals the one nearest to the root."""
    return min(reversed(chain), key=lambda link: link.ends, default=None)


def expiry_text(link: ChainCertificate, signed: str) -> str:
    """Return the error message for an expired certificate; `signed` names what it has signed."""
    when = f"has expired at {link.ends:%Y-%m-%d %H:%M} UTC"
    if not link.is_authority:
        return f"{link} {when}; renew it"
    return (
        f"{link}, which has signed {signed}, {when}; renew it and what it has signed: "
        f"`stratagem certs renew-authority`, or as your own authority does"
    )


def _link(file: str, certificate: x509.Certificate, *, is_authority: bool) -> ChainCertificate:
    return ChainCertificate(
        file,
        certificate.subject.rfc4514_string(),
        is_authority,
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
    )


def has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Return whether the authority's key has signed the certificate."""
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


# ---- TLS files ----

DEFAULT_TRUST_DOMAIN: Final = "stratagem"
POOL: Final = "pool"
"""The pseudo-role in the URI of a certificate that all workers of a pool share."""
_ANY: Final = "*."
_SPIFFE: Final = re.compile(
    r"spiffe://(?P<trust>[a-z0-9._-]{1,255})/role/(?P<role>[a-z]+)/(?P<name>[A-Za-z0-9._-]{1,64})"
)

File = str | PathLike[str]


class Role(StrEnum):
    """The role of a certificate's holder."""

    COORDINATOR = "coordinator"
    WORKER = "worker"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class CertId:
    """The identity stated in a certificate: trust domain, role and name."""

    trust_domain: str
    role: Role
    name: str
    """The name of the holder; `*.` and the pool in a certificate shared by a pool."""

    def __str__(self) -> str:
        return f"{self.role} {self.name}"

    @property
    def pool(self) -> str:
        """Return the pool that shares the certificate; "" if it has a single holder."""
        return self.name.removeprefix(_ANY) if self.name.startswith(_ANY) else ""

    @property
    def uri(self) -> str:
        role, name = (POOL, self.pool) if self.pool else (self.role, self.name)
        return f"spiffe://{self.trust_domain}/role/{role}/{name}"

    def covers(self, name: str) -> bool:
        """Return whether the holder of this identity may act under the name."""
        label, _, rest = name.partition(".")
        return name == self.name or bool(self.pool and label and rest == self.pool)

    @classmethod
    def from_uris(cls, uris: list[str]) -> Self:
        """Parse the identity from a certificate's URIs. Raises InvalidInputError unless there is
        exactly one."""
        matches = [match_ for match_ in map(_SPIFFE.fullmatch, uris) if match_ is not None]
        if len(matches) != 1:
            named = ", ".join(uris) or "no URI at all"
            raise InvalidInputError.at(
                "certificate",
                f"must have one URI spiffe://TRUST/role/ROLE/NAME, and it has {named}",
            )
        trust_domain, role, name = matches[0]["trust"], matches[0]["role"], matches[0]["name"]
        if role == POOL:
            return cls(trust_domain, Role.WORKER, of_pool(name))
        if role not in tuple(Role):
            roles = ", ".join((*Role, POOL))
            raise InvalidInputError.at("certificate", f"role {role!r} is not one of {roles}")
        return cls(trust_domain, Role(role), name)


def of_pool(pool: str) -> str:
    """Return the wildcard name for a certificate shared by all workers `<label>.<pool>`."""
    return f"{_ANY}{pool}"


def worker_name(trust_domain: str, worker_id: str = "") -> str:
    """Return the DNS name in the certificate of a worker, or of any worker if none is named. The
    name for a pool has a wildcard for one label: `*.<pool>.worker.<trust domain>`."""
    return ".".join(label for label in (worker_id, Role.WORKER, trust_domain) if label)


@dataclass(frozen=True, slots=True)
class Material:
    """The content of a process's TLS files, checked to match one another."""

    ca: bytes
    cert: bytes | None
    key: bytes | None
    cert_id: CertId | None
    chain: Chain = ()
    """The process's certificate and the known authorities above it; empty without a certificate."""

    @property
    def expires(self) -> datetime | None:
        """Return the time at which the first certificate of the chain expires; None without one."""
        first = first_to_end(self.chain)
        return None if first is None else first.ends

    @property
    def problem(self) -> str:
        """Return a sentence about an expired certificate of the chain; "" if none has expired."""
        link = ended(self.chain)
        return "" if link is None else expiry_text(link, str(self.chain[0]))


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files by which a process verifies others (`ca`) and proves itself (`cert`, `key`)."""

    ca: File
    cert: File | None = None
    key: File | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, missing = ("cert", "key") if self.key is None else ("key", "cert")
            raise InvalidInputError.at(f"tls_{missing}", f"is needed where tls_{given} is given")

    @property
    def paths(self) -> list[File]:
        """Return the paths of the files that are configured."""
        return [path for path in (self.ca, self.cert, self.key) if path is not None]

    def read(self) -> Material:
        """Read the files. Raises InvalidInputError, which names an unusable file and the reason."""
        ca = _read("tls_ca", self.ca)
        authorities = certificates_in("tls_ca", self.ca, ca)
        if self.cert is None or self.key is None:
            return Material(ca, None, None, None)
        cert, key = _read("tls_cert", self.cert), _read("tls_key", self.key)
        certificates = certificates_in("tls_cert", self.cert, cert)
        leaf = certificates[0]
        self._check_pair(leaf, key)
        check_private("tls_key", self.key)
        try:
            cert_id = CertId.from_uris(uris_of(leaf))
        except InvalidInputError as error:
            message = f"{self.cert}: {error.violations[0].message}"
            raise InvalidInputError.at("tls_cert", message) from None
        chain = chain_of(str(self.cert), certificates, str(self.ca), authorities)
        return Material(ca, cert, key, cert_id, chain)

    def identity(self) -> CertId:
        """Return this process's identity. Raises InvalidInputError if it has no certificate."""
        cert_id = self.read().cert_id
        if cert_id is None:
            raise InvalidInputError.at("tls_cert", "is needed: this process must prove who it is")
        return cert_id

    def _check_pair(self, leaf: x509.Certificate, key: bytes) -> None:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            PublicFormat,
            load_pem_private_key,
        )

        try:
            mine = load_pem_private_key(key, None).public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidInputError.at(
                "tls_key", f"{self.key} holds no PEM key without a password: {plainly(error)}"
            ) from None
        form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if mine.public_bytes(*form) != leaf.public_key().public_bytes(*form):
            raise InvalidInputError.at("tls_key", f"{self.key} is not the key of {self.cert}")


def tls_files(
    ca: Path | None, cert: Path | None, key: Path | None, *, needs_cert: bool
) -> TlsFiles | None:
    """Make TlsFiles from three settings; None if none is set. Raises InvalidInputError, which names
    a missing one. needs_cert: the process must prove its identity, as every server must."""
    given = {"tls_ca": ca, "tls_cert": cert, "tls_key": key}
    if not any(given.values()):
        return None
    needed = given if needs_cert else ("tls_ca",)
    for name in needed:
        if given[name] is None:
            there = ", ".join(setting for setting, path in given.items() if path is not None)
            raise InvalidInputError.at(name, f"is needed where {there} is given")
    assert ca is not None
    return TlsFiles(ca, cert, key)


def links_of(field: str, file: Path) -> Chain:
    """Read the certificate chain in one file. Raises InvalidInputError that names the setting."""
    certificates = certificates_in(field, file)
    return chain_of(str(file), certificates, "", ())


def uris_of(certificate: x509.Certificate) -> list[str]:
    """Return the URIs among the subject alternative names of a certificate."""
    from cryptography import x509

    return names_of(certificate, x509.UniformResourceIdentifier)


def names_of(certificate: x509.Certificate, kind: type[x509.GeneralName]) -> list[str]:
    """Return the subject alternative names of one kind in a certificate."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, kind)]


def _read(field: str, path: File) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInputError.at(field, f"{path}: {error.strerror}") from None


def certificates_in(field: str, path: File, pem: bytes | None = None) -> list[x509.Certificate]:
    """Parse the certificates of a file, whose content may be passed. Raises InvalidInputError,
    which names the field and a file that cannot be read or holds none."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(_read(field, path) if pem is None else pem)
    except ValueError as error:
        raise InvalidInputError.at(
            field, f"{path} holds no PEM certificate: {plainly(error)}"
        ) from None


# ---- gRPC credentials ----
#
# The files of the credentials may be replaced while the process runs.
#
# No other code makes credentials, for servers or for channels. gRPC can make a listener demand a
# client's certificate, or not ask at all; there is nothing between. One listener therefore takes
# certificates, and people with tokens use another.

log = structlog.get_logger()


class FreshFiles:
    """The newest usable content of TLS files, reloaded on change; thread-safe."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises InvalidInputError if they cannot be used."""
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
        """Reload changed files; return whether the content has changed since the last call.

        Files that do not match, such as a new certificate with its old key, are read again at their
        next change; until then the old content is used.
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
    """Return gRPC credentials for a listener; each handshake uses the newest files.

    asks_for_certificate: callers must have a certificate of the same CA. Otherwise they are not
    asked for one, and their token decides.
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
    """Return gRPC credentials for a connection; changed files need a new connection."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def _when(material: Material) -> str:
    return "" if material.expires is None else material.expires.isoformat()

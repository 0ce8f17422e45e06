"""Makes the certificates of a development cluster: one authority, one certificate per process.

For trying things out and for tests; where certificates matter, an authority of your own makes
them, and this module says by example what must stand in them. Keys are readable by their owner
alone, and nothing is overwritten.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stratagem.common.errors import AlreadyExistsError, InvalidInputError
from stratagem.common.ids import check_worker_id
from stratagem.common.rpc.tls import (
    DEFAULT_TRUST_DOMAIN,
    POOL,
    CertId,
    Role,
    TlsFiles,
    names_of,
    of_pool,
    uris_of,
    worker_name,
)
from stratagem.common.whole_file import whole_file

CA_FILE: Final = "ca.crt"
CA_KEY_FILE: Final = "ca.key"
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
DEFAULT_DAYS: Final = 30
_SKEW: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority that lies in a folder with what it has signed."""

    folder: Path
    trust_domain: str = DEFAULT_TRUST_DOMAIN

    def issue(
        self,
        role: Role,
        name: str,
        hosts: Sequence[str] = (),
        valid: timedelta = timedelta(days=DEFAULT_DAYS),
        *,
        renew: bool = False,
    ) -> TlsFiles:
        """Sign a certificate; the files of its holder. `renew` replaces it and its key.

        name: `of_pool(...)` makes one that the workers of a pool share.
        hosts: names and addresses at which a coordinator is reached.
        """
        cert_id = CertId(self.trust_domain, role, name)
        file = _file_name(cert_id)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(key.public_key(), cert_id, hosts, valid)
        for path, content, mode in (
            (self.folder / f"{file}.key", _pem(key), 0o600),
            (self.folder / f"{file}.crt", certificate.public_bytes(Encoding.PEM), 0o644),
        ):
            _write(path, content, mode, replace=renew)
        return self.files(file)

    def files(self, name: str) -> TlsFiles:
        """Where a certificate of this authority lies: `coordinator`, `worker-w0`, `pool-a`."""
        folder = self.folder
        return TlsFiles(folder / CA_FILE, folder / f"{name}.crt", folder / f"{name}.key")

    def _sign(
        self,
        public_key: ec.EllipticCurvePublicKey,
        cert_id: CertId,
        hosts: Sequence[str],
        valid: timedelta,
    ) -> x509.Certificate:
        authority = x509.load_pem_x509_certificate((self.folder / CA_FILE).read_bytes())
        key = load_pem_private_key((self.folder / CA_KEY_FILE).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if cert_id.role is not Role.CLIENT:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = x509.SubjectAlternativeName([*map(_general_name, _names(cert_id, hosts))])
        return (
            _builder(_subject(str(cert_id)), valid)
            .issuer_name(authority.subject)
            .public_key(public_key)
            .add_extension(names, critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(_issued_by(authority), critical=False)
            .sign(key, hashes.SHA256())
        )


def make_authority(
    folder: Path,
    trust_domain: str = DEFAULT_TRUST_DOMAIN,
    valid: timedelta = timedelta(days=DEFAULT_DAYS),
) -> Authority:
    """A new authority; AlreadyExistsError where there is one."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(f"{trust_domain} development authority")
    certificate = (
        _builder(subject, valid)
        .issuer_name(subject)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(True, 0), critical=True)
        .add_extension(_CA_USAGE, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder / CA_KEY_FILE, _pem(key), 0o600)
    _write(folder / CA_FILE, certificate.public_bytes(Encoding.PEM), 0o644)
    return Authority(folder, trust_domain)


def init(
    folder: Path,
    *,
    workers: Sequence[str],
    clients: Sequence[str],
    hosts: Sequence[str],
    pools: Sequence[str] = (),
    trust_domain: str = DEFAULT_TRUST_DOMAIN,
    days: int = DEFAULT_DAYS,
) -> list[Path]:
    """The files of a new authority, a coordinator, workers, pools and clients; the certificates.

    AlreadyExistsError where one of the files is there; then nothing is written.
    """
    wanted = [(Role.COORDINATOR, "coordinator"), *_named(workers, pools, clients)]
    names = ["ca", *(_file_name(CertId(trust_domain, *each)) for each in wanted)]
    for name in names:
        for path in (folder / f"{name}.crt", folder / f"{name}.key"):
            if path.exists():
                raise AlreadyExistsError(f"{path} is there already; name another folder")
    valid = timedelta(days=days)
    authority = make_authority(folder, trust_domain, valid)
    for role, name in wanted:
        reached_at = [*LOOPBACK, *hosts] if role is Role.COORDINATOR else []
        authority.issue(role, name, reached_at, valid)
    return [folder / f"{name}.crt" for name in names]


def issue(
    folder: Path,
    *,
    workers: Sequence[str],
    clients: Sequence[str],
    pools: Sequence[str] = (),
    renew: bool = False,
    days: int = DEFAULT_DAYS,
) -> list[Path]:
    """Sign for more processes with an authority that is there; the certificates.

    renew: replace those that are there, and without names all of them.
    """
    known = [show(path) for path in sorted(folder.glob("*.crt"))]
    named = [each for each in known if each.name]
    if not (folder / CA_KEY_FILE).exists() or not named:
        raise InvalidInputError.at("folder", f"{folder} was not made by `stratagem certs init`")
    authority = Authority(folder, named[0].trust_domain)
    wanted: list[tuple[Role, str, Sequence[str]]]
    wanted = [(*each, ()) for each in _named(workers, pools, clients)]
    if renew and not wanted:
        wanted = [(Role(each.role), each.name, _own_hosts(each)) for each in named]
    if not wanted:
        raise InvalidInputError.at("worker", "name a worker or a client, or renew all")
    made = [
        authority.issue(role, name, hosts, timedelta(days=days), renew=renew)
        for role, name, hosts in wanted
    ]
    return [Path(each.cert or "") for each in made]


def _named(
    workers: Sequence[str], pools: Sequence[str], clients: Sequence[str]
) -> list[tuple[Role, str]]:
    """Whom certificates are wanted for. Raises InvalidInputError for what is no name."""
    return [
        *((Role.WORKER, check_worker_id(each)) for each in workers),
        *((Role.WORKER, of_pool(check_worker_id(each))) for each in pools),
        *((Role.CLIENT, check_worker_id(each)) for each in clients),
    ]


def _file_name(cert_id: CertId) -> str:
    if cert_id.pool:
        return f"{POOL}-{cert_id.pool}"
    return cert_id.name if cert_id.role is Role.COORDINATOR else f"{cert_id.role}-{cert_id.name}"


def _own_hosts(shown: Shown) -> Sequence[str]:
    """The hosts that were asked for; a worker's names follow from its identity."""
    return shown.hosts if shown.role == Role.COORDINATOR else ()


@dataclass(frozen=True, slots=True)
class Shown:
    """What a certificate says."""

    file: str
    role: str
    """Or `authority`; empty where it names no role."""
    name: str
    trust_domain: str
    hosts: tuple[str, ...]
    uris: tuple[str, ...]
    expires: datetime

    @property
    def has_expired(self) -> bool:
        return self.expires <= datetime.now(UTC)


def show(path: Path) -> Shown:
    """Read one certificate file; InvalidInputError when it holds none."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise InvalidInputError.at("file", f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInputError.at("file", f"{path} holds no PEM certificate: {error}") from None
    uris = uris_of(certificate)
    role = name = trust_domain = ""
    try:
        cert_id = CertId.from_uris(uris)
    except InvalidInputError:
        role = "authority" if _is_authority(certificate) else ""
    else:
        role, name, trust_domain = cert_id.role, cert_id.name, cert_id.trust_domain
    hosts = [*names_of(certificate, x509.DNSName), *names_of(certificate, x509.IPAddress)]
    expires = certificate.not_valid_after_utc
    return Shown(str(path), role, name, trust_domain, tuple(hosts), tuple(uris), expires)


_CA_USAGE: Final = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _names(cert_id: CertId, hosts: Sequence[str]) -> list[str]:
    names = [cert_id.uri, *hosts]
    if cert_id.role is Role.WORKER:
        names += [
            worker_name(cert_id.trust_domain, cert_id.name),
            worker_name(cert_id.trust_domain),
        ]
    return names


def _general_name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _builder(subject: x509.Name, valid: timedelta) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + valid) - _SKEW)
        .not_valid_after(now + valid)
    )


def _issued_by(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """By its key: an authority and the one that takes its place have the same name."""
    key_id = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int, *, replace: bool = False) -> None:
    """All of it or nothing, never with more rights than `mode`."""
    if path.exists() and not replace:
        raise AlreadyExistsError(f"{path} is there already")
    with whole_file(path, mode=mode) as file:
        file.write(content)

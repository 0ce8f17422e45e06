"""Make the certificates of a development cluster: one authority, one certificate per process.

They are meant for trials and for tests. In production an authority of your own makes certificates,
and this module shows by example what they must contain. Only their owner can read the keys, and
nothing is overwritten.
"""

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

from stratagem.common.base.errors import AlreadyExistsError, InvalidInputError, WrongStateError
from stratagem.common.base.files import check_private, whole_file
from stratagem.common.base.ids import check_worker_id
from stratagem.common.base.text import plainly
from stratagem.common.identity.tls import (
    AUTHORITY,
    DEFAULT_TRUST_DOMAIN,
    POOL,
    CertId,
    Role,
    TlsFiles,
    certificates_in,
    has_signed,
    names_of,
    of_pool,
    uris_of,
    worker_name,
)

# ---- Authorities ----
#
# A development authority is created, replaces another one, and signs certificates.
#
# A folder has `ca.crt`, the trusted authorities, and `ca.key`, the key of the one that signs now.
# While one takes the place of another both are trusted, so certificates of either count and
# processes need not be restarted together; their names are the same, their keys are different.

CA_FILE: Final = "ca.crt"
CA_KEY_FILE: Final = "ca.key"
DAYS: Final = 3650
"""The number of days for which an authority is valid."""
SKEW: Final = timedelta(minutes=5)
"""The time by which validity begins before now, so that slow clocks accept new certificates."""


def create(folder: Path, trust_domain: str, valid: timedelta) -> None:
    """Create a first authority: its key and certificate. Raises AlreadyExistsError if it exists."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = subject(f"{trust_domain} development authority")
    key, certificate = _new(name, valid)
    write(folder / CA_KEY_FILE, private_pem(key), 0o600)
    write(folder / CA_FILE, certificate.public_bytes(Encoding.PEM), 0o644)


def trusted(folder: Path) -> list[x509.Certificate]:
    """Return the certificates of the trusted authorities in a folder that `certs init` made."""
    return certificates_in("folder", folder / CA_FILE)


def signer(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the certificate of the authority that signs now, and its private key."""
    path = folder / CA_KEY_FILE
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else plainly(error)
        raise InvalidInputError.at("folder", f"{path}: {reason}") from None
    check_private("folder", path)
    for certificate in trusted(folder):
        if isinstance(key, ec.EllipticCurvePrivateKey) and (
            certificate.public_key() == key.public_key()
        ):
            return certificate, key
    message = f"{path} is the key of no authority in {folder / CA_FILE}"
    raise InvalidInputError.at("folder", message)


def renew(folder: Path, valid: timedelta) -> None:
    """Create an authority that signs from now on; the old one stays trusted.

    Raises WrongStateError if two are trusted already. A crash between the two files leaves an
    authority that is trusted and has signed nothing; `retire` drops it.
    """
    old, _ = signer(folder)
    if len(trusted(folder)) > 1:
        raise WrongStateError(
            f"{folder / CA_FILE} holds two authorities already; `stratagem certs retire-authority "
            f"{folder}` drops the one that signs no more"
        )
    key, certificate = _new(old.subject, valid)
    both = certificate.public_bytes(Encoding.PEM) + old.public_bytes(Encoding.PEM)
    write(folder / CA_FILE, both, 0o644, replace=True)
    write(folder / CA_KEY_FILE, private_pem(key), 0o600, replace=True)


def retire(folder: Path, signed: Sequence[Path]) -> None:
    """Stop trusting the authority that no longer signs. Raises WrongStateError if there is none, or
    if it has signed one of the certificates in these files."""
    current, _ = signer(folder)
    if len(trusted(folder)) == 1:
        raise WrongStateError(f"{folder / CA_FILE} holds one authority; there is none to retire")
    unsigned = [path.name for path in signed if not _has_signed(current, path)]
    if unsigned:
        raise WrongStateError(
            f"the authority that signs now has not signed {', '.join(unsigned)}: "
            f"`stratagem certs issue {folder} --renew` first, and give the new files to everybody"
        )
    write(folder / CA_FILE, current.public_bytes(Encoding.PEM), 0o644, replace=True)


def subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def builder(name: x509.Name, ends: datetime) -> x509.CertificateBuilder:
    """Return a builder for an X.509 certificate that is valid from now until `ends`."""
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), ends) - SKEW)
        .not_valid_after(ends)
    )


def issued_by(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """Return the extension that names the issuer by key, as a renewed authority keeps its name."""
    key_id = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write(path: Path, content: bytes, mode: int, *, replace: bool = False) -> None:
    """Write a new file, or replace one, atomically and never with wider permissions than `mode`."""
    if path.exists() and not replace:
        raise AlreadyExistsError(f"{path} is there already")
    with whole_file(path, mode=mode) as file:
        file.write(content)


def certificate_of(
    key: ec.EllipticCurvePrivateKey, name: x509.Name, valid: timedelta
) -> x509.Certificate:
    """Make the self-signed certificate of an authority with this key."""
    public = key.public_key()
    return (
        builder(name, datetime.now(UTC) + valid)
        .issuer_name(name)
        .public_key(public)
        .add_extension(x509.BasicConstraints(True, 0), critical=True)
        .add_extension(_CA_USAGE, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def _new(name: x509.Name, valid: timedelta) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    return key, certificate_of(key, name, valid)


def _has_signed(authority: x509.Certificate, path: Path) -> bool:
    try:
        return has_signed(authority, x509.load_pem_x509_certificate(path.read_bytes()))
    except (OSError, ValueError):  # no certificate at all
        return False


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


# ---- Certificates ----

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
DEFAULT_DAYS: Final = 90
"""The default number of days for which a certificate is valid; its authority may end earlier."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in a folder, with the certificates that it has signed."""

    folder: Path
    trust_domain: str = DEFAULT_TRUST_DOMAIN

    def issue(
        self,
        role: Role,
        name: str,
        hosts: Sequence[str] = (),
        valid: timedelta | None = None,
        *,
        renew: bool = False,
    ) -> TlsFiles:
        """Sign a certificate and return the files of its holder. `renew` replaces it and its key.

        name: `of_pool(...)` makes one that the workers of a pool share.
        hosts: names and addresses at which a coordinator is reached.
        valid: the period of validity; InvalidInputError if it outlasts the authority. By default
            some months, but no longer than the authority.
        """
        cert_id = CertId(self.trust_domain, role, name)
        file = _file_name(cert_id)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(key.public_key(), cert_id, hosts, self.end_of(valid))
        for path, content, mode in (
            (self.folder / f"{file}.key", private_pem(key), 0o600),
            (self.folder / f"{file}.crt", certificate.public_bytes(Encoding.PEM), 0o644),
        ):
            write(path, content, mode, replace=renew)
        return self.files(file)

    def end_of(self, valid: timedelta | None) -> datetime:
        """Return the time at which a certificate signed now ends. Raises InvalidInputError if
        `valid` is too long."""
        authority, _ = signer(self.folder)
        now, last = datetime.now(UTC), authority.not_valid_after_utc
        path = self.folder / CA_FILE
        if last <= now:
            raise InvalidInputError.at(
                "folder",
                f"the authority in {path} has expired at {last:%Y-%m-%d %H:%M} UTC and can sign "
                f"nothing; `stratagem certs renew-authority {self.folder}` makes a new one",
            )
        if valid is None:
            return min(now + timedelta(days=DEFAULT_DAYS), last)
        if now + valid > last:
            raise InvalidInputError.at(
                "days",
                f"until {now + valid:%Y-%m-%d} is longer than the authority in {path} is valid, "
                f"which is until {last:%Y-%m-%d %H:%M} UTC; ask for {(last - now).days} days at "
                f"most, or `stratagem certs renew-authority {self.folder}` first",
            )
        return now + valid

    def files(self, name: str) -> TlsFiles:
        """Return the paths of the TLS files of a certificate, named as `worker-w0` or `pool-a`."""
        folder = self.folder
        return TlsFiles(folder / CA_FILE, folder / f"{name}.crt", folder / f"{name}.key")

    def _sign(
        self,
        public_key: ec.EllipticCurvePublicKey,
        cert_id: CertId,
        hosts: Sequence[str],
        ends: datetime,
    ) -> x509.Certificate:
        authority, key = signer(self.folder)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if cert_id.role is not Role.CLIENT:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = x509.SubjectAlternativeName([*map(_general_name, _names(cert_id, hosts))])
        return (
            builder(subject(str(cert_id)), ends)
            .issuer_name(authority.subject)
            .public_key(public_key)
            .add_extension(names, critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(issued_by(authority), critical=False)
            .sign(key, hashes.SHA256())
        )


def make_authority(
    folder: Path,
    trust_domain: str = DEFAULT_TRUST_DOMAIN,
    valid: timedelta = timedelta(days=DAYS),
) -> Authority:
    """Create an authority. Raises AlreadyExistsError if there is one."""
    create(folder, trust_domain, valid)
    return Authority(folder, trust_domain)


def init(
    folder: Path,
    *,
    workers: Sequence[str],
    clients: Sequence[str],
    hosts: Sequence[str],
    pools: Sequence[str] = (),
    trust_domain: str = DEFAULT_TRUST_DOMAIN,
    days: int | None = None,
) -> list[Path]:
    """Create an authority, and certificates of a coordinator, workers, pools and clients; return
    their paths. Raises AlreadyExistsError if one of the files exists, InvalidInputError if `days`
    exceed the authority's validity; then nothing is written."""
    if days is not None and days > DAYS:
        message = f"{days} is more than the {DAYS} for which an authority is valid"
        raise InvalidInputError.at("days", message)
    wanted = [(Role.COORDINATOR, "coordinator"), *_named(workers, pools, clients)]
    names = ["ca", *(_file_name(CertId(trust_domain, *party)) for party in wanted)]
    for name in names:
        for path in (folder / f"{name}.crt", folder / f"{name}.key"):
            if path.exists():
                raise AlreadyExistsError(f"{path} is there already; name another folder")
    authority = make_authority(folder, trust_domain)
    for role, name in wanted:
        reached_at = [*LOOPBACK, *hosts] if role is Role.COORDINATOR else []
        authority.issue(role, name, reached_at, _valid(days))
    return [folder / f"{name}.crt" for name in names]


def issue(
    folder: Path,
    *,
    workers: Sequence[str],
    clients: Sequence[str],
    pools: Sequence[str] = (),
    renew: bool = False,
    days: int | None = None,
) -> list[Path]:
    """Sign certificates for more processes with an existing authority; return their paths. renew:
    replace existing certificates, all of them if no names are given."""
    named = _signed(folder)
    authority = Authority(folder, named[0].trust_domain)
    wanted: list[tuple[Role, str, Sequence[str]]]
    wanted = [(*name, ()) for name in _named(workers, pools, clients)]
    if renew and not wanted:
        # The hosts that were asked for: a worker's names follow from its identity.
        wanted = [
            (Role(cert.role), cert.name, cert.hosts if cert.role == Role.COORDINATOR else ())
            for cert in named
        ]
    if not wanted:
        raise InvalidInputError.at("worker", "name a worker or a client, or renew all")
    valid = _valid(days)
    authority.end_of(valid)  # refuse before the first one is replaced
    made = [authority.issue(role, name, hosts, valid, renew=renew) for role, name, hosts in wanted]
    return [Path(cert.cert or "") for cert in made]


def renew_authority(folder: Path) -> Path:
    """Add a new authority to a folder of `init`; return the file with both authorities."""
    _signed(folder)
    renew(folder, timedelta(days=DAYS))
    return folder / CA_FILE


def retire_authority(folder: Path) -> Path:
    """Drop the authority that no longer signs; return the file with the one that is left."""
    retire(folder, [Path(cert.file) for cert in _signed(folder)])
    return folder / CA_FILE


def _signed(folder: Path) -> "list[Shown]":
    """Return the certificates in a folder of `init` that an authority has signed."""
    certs = [cert for path in sorted(folder.glob("*.crt")) for cert in show(path)]
    named = [cert for cert in certs if cert.name]
    if not (folder / CA_KEY_FILE).exists() or not named:
        raise InvalidInputError.at("folder", f"{folder} was not made by `stratagem certs init`")
    return named


def _valid(days: int | None) -> timedelta | None:
    return None if days is None else timedelta(days=days)


def _named(
    workers: Sequence[str], pools: Sequence[str], clients: Sequence[str]
) -> list[tuple[Role, str]]:
    """Return the (role, name) of each certificate to make. Raises InvalidInputError for a bad
    name."""
    return [
        *((Role.WORKER, check_worker_id(worker)) for worker in workers),
        *((Role.WORKER, of_pool(check_worker_id(pool))) for pool in pools),
        *((Role.CLIENT, check_worker_id(client)) for client in clients),
    ]


def _file_name(cert_id: CertId) -> str:
    if cert_id.pool:
        return f"{POOL}-{cert_id.pool}"
    return cert_id.name if cert_id.role is Role.COORDINATOR else f"{cert_id.role}-{cert_id.name}"


@dataclass(frozen=True, slots=True)
class Shown:
    """The contents of a certificate, as shown to people."""

    file: str
    role: str
    """The role, or `authority`; empty if the certificate names no role."""
    name: str
    trust_domain: str
    hosts: tuple[str, ...]
    uris: tuple[str, ...]
    expires: datetime
    fingerprint: str
    """The fingerprint, as in a revocation list; it distinguishes authorities of one name."""

    @property
    def has_expired(self) -> bool:
        return self.expires <= datetime.now(UTC)


def show(path: Path) -> list[Shown]:
    """Return the contents of a file's certificates. Raises InvalidInputError if it has none."""
    return [_contents_of(path, certificate) for certificate in certificates_in("file", path)]


def _contents_of(path: Path, certificate: x509.Certificate) -> Shown:
    uris = uris_of(certificate)
    role = name = trust_domain = ""
    try:
        cert_id = CertId.from_uris(uris)
    except InvalidInputError:
        role = AUTHORITY if _is_authority(certificate) else ""
    else:
        role, name, trust_domain = cert_id.role, cert_id.name, cert_id.trust_domain
    hosts = [*names_of(certificate, x509.DNSName), *names_of(certificate, x509.IPAddress)]
    expires = certificate.not_valid_after_utc
    digest = f"sha256:{certificate.fingerprint(hashes.SHA256()).hex()}"
    return Shown(str(path), role, name, trust_domain, tuple(hosts), tuple(uris), expires, digest)


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


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False

"""Authorities for development: how one is made, takes the place of another, and signs.

A folder has `ca.crt`, the authorities that are trusted, and `ca.key`, the key of the one that signs
now. While one takes the place of another both are trusted, so that certificates of either count and
no processes have to be restarted together; their names are the same, their keys are different.
Knows nothing of who the certificates are for (`certificates.py`).
"""

from collections.abc import Sequence
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
from cryptography.x509.oid import NameOID

from stratagem.common.base.errors import AlreadyExistsError, InvalidInputError, WrongStateError
from stratagem.common.base.wording import plainly
from stratagem.common.files.atomic_file import whole_file
from stratagem.common.files.private_file import check_private
from stratagem.common.identity.certificate_chain import has_signed
from stratagem.common.identity.tls_files import certificates_in

CA_FILE: Final = "ca.crt"
CA_KEY_FILE: Final = "ca.key"
DAYS: Final = 3650
"""How long an authority is valid, which is not renewed every month."""
SKEW: Final = timedelta(minutes=5)
"""For clocks that are behind: what is new is valid from before now on."""


def create(folder: Path, trust_domain: str, valid: timedelta) -> None:
    """The files of a first authority; AlreadyExistsError where there is one."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = subject(f"{trust_domain} development authority")
    key, certificate = _new(name, valid)
    write(folder / CA_KEY_FILE, private_pem(key), 0o600)
    write(folder / CA_FILE, certificate.public_bytes(Encoding.PEM), 0o644)


def trusted(folder: Path) -> list[x509.Certificate]:
    """The authorities in a folder that `certs init` has made."""
    return certificates_in("folder", folder / CA_FILE)


def signer(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority that signs now: of those that are trusted the one whose key is there."""
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
    """A new authority next to the old one, which stays trusted; from now on the new one signs.

    WrongStateError while two are trusted already. A crash between the two files leaves an authority
    that is trusted and has signed nothing; `retire` drops it.
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
    """Trust the authority that signs now alone. WrongStateError when there is no other, and while
    one of the certificates in these files is of another."""
    current, _ = signer(folder)
    if len(trusted(folder)) == 1:
        raise WrongStateError(f"{folder / CA_FILE} holds one authority; there is none to retire")
    left = [path.name for path in signed if not _has_signed(current, path)]
    if left:
        raise WrongStateError(
            f"the authority that signs now has not signed {', '.join(left)}: "
            f"`stratagem certs issue {folder} --renew` first, and give the new files to everybody"
        )
    write(folder / CA_FILE, current.public_bytes(Encoding.PEM), 0o644, replace=True)


def subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def builder(name: x509.Name, ends: datetime) -> x509.CertificateBuilder:
    """Return a builder of a certificate that is valid from now until `ends`."""
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), ends) - SKEW)
        .not_valid_after(ends)
    )


def issued_by(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """Return an authority's identifier by its key: an authority and its successor have the same
    name."""
    key_id = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write(path: Path, content: bytes, mode: int, *, replace: bool = False) -> None:
    """All of it or nothing, never with more rights than `mode`."""
    if path.exists() and not replace:
        raise AlreadyExistsError(f"{path} is there already")
    with whole_file(path, mode=mode) as file:
        file.write(content)


def certificate_of(
    key: ec.EllipticCurvePrivateKey, name: x509.Name, valid: timedelta
) -> x509.Certificate:
    """Sign the certificate of an authority with this key."""
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

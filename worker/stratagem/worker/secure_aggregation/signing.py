"""Who signs for a client, and whose signatures count.

A worker signs with the key of its certificate. It believes a certificate that is of a worker of its
own trust domain, that an authority it knows has issued, and, where its site names the consortium's
certificates or an authority of its own, that is one of those. Without certificates each client has
an Ed25519 key for the round, which proves no more than that one and the same has signed: such a
federation trusts its coordinator to follow the protocol.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.identity.callers import RevokedFile
from stratagem.common.identity.tls import CertId, Material, Role, TlsFiles, certificates_in, uris_of
from stratagem.worker.site.site_file import PeerPins

_PSS: Final = padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)
_MAX_LINKS: Final = 8
_RAW_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class SignedIdentity:
    """What signs for a client: a certificate with those above it, in DER, or a raw public key."""

    identity: bytes
    issuers: tuple[bytes, ...] = ()


class WorkerSigner:
    """Signs as the worker, and says whose signature counts. Files are read when they are used, as
    certificates are renewed while a worker runs."""

    def __init__(self, tls: TlsFiles | None = None, revoked: RevokedFile | None = None) -> None:
        self._tls, self._revoked = tls, revoked

    def identity(self, root: bytes) -> SignedIdentity:
        """Return what others verify this worker's signatures with. root: of the client's secrets,
        from which its own key follows where there is no certificate."""
        if self._tls is None:
            return _own_identity(root)
        return _identity_of(self._tls, self._tls.read())

    def sign(self, root: bytes, text: bytes) -> tuple[SignedIdentity, bytes]:
        """Return the signature of a text, and what it is verified with: of one key, also while the
        certificate is renewed."""
        if self._tls is None:
            return _own_identity(root), _own_key(root).sign(text)
        material = self._tls.read()
        assert material.key is not None, "a worker with authorities has a certificate"
        identity = _identity_of(self._tls, material)
        match key := load_pem_private_key(material.key, None):
            case ec.EllipticCurvePrivateKey():
                return identity, key.sign(text, ec.ECDSA(SHA256()))
            case Ed25519PrivateKey():
                return identity, key.sign(text)
            case rsa.RSAPrivateKey():
                return identity, key.sign(text, _PSS, SHA256())
            case _:
                why = f"{type(key).__name__} signs nothing; use an EC, Ed25519 or RSA key"
                raise InvalidInputError.at("tls_key", why)

    def check_peer(self, who: str, signed: SignedIdentity, pins: PeerPins | None) -> None:
        """Raise InvalidInputError or UnauthenticatedError where this is no identity that counts.
        pins: of the site; None: it has none."""
        if self._tls is None and pins is None:
            if len(signed.identity) != _RAW_KEY_BYTES:
                raise InvalidInputError(f"{who} has no Ed25519 key, and there are no certificates")
            return
        if self._tls is None:
            raise InvalidInputError("peers are pinned, and this worker has no certificates")
        leaf = _certificate(who, signed.identity)
        between = [_certificate(who, each) for each in signed.issuers[:_MAX_LINKS]]
        own = self._tls.identity()
        authorities = certificates_in("tls_ca", self._tls.ca)
        now = datetime.now(UTC)
        if not _is_issued(leaf, between, authorities, now):
            raise InvalidInputError(
                f"{who}: no authority of this worker has issued its certificate"
            )
        cert_id = CertId.from_uris(uris_of(leaf))
        if cert_id.role is not Role.WORKER or cert_id.trust_domain != own.trust_domain:
            raise InvalidInputError(
                f"{who}: its certificate is of {cert_id}, and of no worker here"
            )
        if self._revoked is not None:
            self._revoked.check(cert_id, leaf.public_bytes(Encoding.PEM))
        if pins is not None and not _is_pinned(leaf, between, pins, now):
            text = "its certificate is none of the consortium's that the site names"
            raise InvalidInputError(f"{who}: {text}")


def is_signed_by(identity: bytes, signature: bytes, text: bytes) -> bool:
    """Return whether the holder of an identity that counts has signed a text."""
    try:
        if len(identity) == _RAW_KEY_BYTES:
            Ed25519PublicKey.from_public_bytes(identity).verify(signature, text)
            return True
        key = x509.load_der_x509_certificate(identity).public_key()
        match key:
            case ec.EllipticCurvePublicKey():
                key.verify(signature, text, ec.ECDSA(SHA256()))
            case Ed25519PublicKey():
                key.verify(signature, text)
            case rsa.RSAPublicKey():
                key.verify(signature, text, _PSS, SHA256())
            case _:
                return False
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


def _own_identity(root: bytes) -> SignedIdentity:
    public = _own_key(root).public_key()
    return SignedIdentity(public.public_bytes(Encoding.Raw, PublicFormat.Raw))


def _identity_of(tls: TlsFiles, material: Material) -> SignedIdentity:
    assert tls.cert is not None, "a worker with authorities has a certificate"
    chain = certificates_in("tls_cert", tls.cert, material.cert)
    leaf, *issuers = [each.public_bytes(Encoding.DER) for each in chain]
    return SignedIdentity(leaf, tuple(issuers))


def _own_key(root: bytes) -> Ed25519PrivateKey:
    seed = hashlib.sha256(b"stratagem secure aggregation identity" + root).digest()
    return Ed25519PrivateKey.from_private_bytes(seed)


def _certificate(who: str, der: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(der)
    except ValueError:
        raise InvalidInputError(f"{who} has no certificate") from None


def _is_pinned(
    leaf: x509.Certificate, between: Sequence[x509.Certificate], pins: PeerPins, now: datetime
) -> bool:
    if leaf.fingerprint(SHA256()).hex() in pins.fingerprints:
        return True
    authorities = [x509.load_der_x509_certificate(each) for each in pins.authorities]
    return _is_issued(leaf, between, authorities, now)


def _is_issued(
    leaf: x509.Certificate,
    between: Sequence[x509.Certificate],
    authorities: Sequence[x509.Certificate],
    now: datetime,
) -> bool:
    """Return whether a chain of certificates that count leads from an authority to the leaf."""
    current = leaf
    for _ in range(_MAX_LINKS):
        if not current.not_valid_before_utc <= now <= current.not_valid_after_utc:
            return False
        if any(_has_issued(each, current) and _counts(each, now) for each in authorities):
            return True
        above = [each for each in between if each != current and _has_issued(each, current)]
        if not above:
            return False
        current = above[0]
    return False


def _counts(authority: x509.Certificate, now: datetime) -> bool:
    return authority.not_valid_before_utc <= now <= authority.not_valid_after_utc


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Return whether one has issued the other, and may: a worker's certificate issues nothing."""
    try:
        limits = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.verify_directly_issued_by(issuer)
    except (x509.ExtensionNotFound, InvalidSignature, ValueError, TypeError):
        return False
    return limits.ca

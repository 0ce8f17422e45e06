"""Store the secrets of a worker's clients in secure rounds and their uses, and sign for the
clients.

There is one record for each client of each run, on disk before an answer leaves where the worker
has a data folder (0600, one file for each), else in memory: a worker that is restarted without one
has lost its keys, and its clients drop out of the round. Only the number of a finished round stays,
so that it is never unmasked a second time.
"""

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from typing import Final

import structlog
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
from stratagem.common.base.files import whole_file
from stratagem.common.identity.callers import RevokedFile
from stratagem.common.identity.tls import CertId, Material, Role, TlsFiles, certificates_in, uris_of
from stratagem.common.schema.json import JSON
from stratagem.common.strategy.secure import SecureAggregation
from stratagem.worker.site.file import PeerPins

# ---- Secret store ----

log = structlog.get_logger(__name__)

MAX_RECORDS: Final = 65_536
_SUFFIX: Final = ".secret"


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """A neighbour's verified identity and public keys, in hexadecimal."""

    share_key: str
    mask_key: str
    identity: str


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The secrets and uses of a client's newest round. Bytes are in hexadecimal."""

    run_id: str
    party: str
    client: int
    round_num: int
    attempt: int
    root: str = field(repr=False)
    """The root of the round's secrets; empty once they are deleted."""
    job: str
    """SHA-256 of the job's text, which must be the same for all clients of the round."""
    spec: SecureAggregation
    """The job's section about secure aggregation."""
    audit: Mapping[str, JSON] = field(default_factory=dict)
    """Fields common to all lines of the site's audit about the round."""
    last_opened: int = 0
    """The newest round in which this client has revealed shares."""
    setup: str = ""
    """SHA-256 of what the shares depend on: the round's members, and the neighbours' keys."""
    members: tuple[int, ...] = ()
    ring_seed: str = ""
    neighbours: Mapping[int, PeerKeys] = field(default_factory=dict)
    routed: tuple[int, ...] = ()
    update: str = ""
    """SHA-256 of the masked update; empty until one may have been sent."""
    survivors: tuple[int, ...] = ()
    """The signed set of survivors; a different one is never signed."""
    identity: str = ""
    """SHA-256 of the identity with which the client's signatures of the round are verified."""

    @property
    def key(self) -> "RecordKey":
        return self.run_id, self.party, self.client

    def forgotten(self) -> "RoundRecord":
        """Return the record without secrets, as it is kept after the round."""
        of_round = self.round_num, self.attempt
        opened = self.last_opened
        return RoundRecord(*self.key, *of_round, "", self.job, self.spec, last_opened=opened)


RecordKey = tuple[str, str, int]
"""The key of a record: run, party, client."""


class SecretStore:
    """The secret records of one worker. Used from any thread, under `lock`."""

    def __init__(self, folder: Path | None) -> None:
        self.lock = RLock()
        self._folder = folder
        self._records: OrderedDict[RecordKey, RoundRecord] = OrderedDict()
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
            for path in files:
                self._load(path)

    def find(self, key: RecordKey) -> RoundRecord | None:
        return self._records.get(key)

    def save(self, record: RoundRecord) -> None:
        """Replace a client's record; it is durable when this returns."""
        if self._folder is not None:
            with whole_file(self._path(record.key), mode=0o600) as file:
                file.write(json.dumps(asdict(record)).encode())
            _sync(self._folder)
        self._records[record.key] = record
        self._records.move_to_end(record.key)
        if len(self._records) > MAX_RECORDS:
            self._drop_oldest()

    def forget_run(self, run_id: str) -> None:
        """Delete the secrets of a run that is over; keep which of its rounds were opened."""
        with self.lock:
            for record in [stored for stored in self._records.values() if stored.run_id == run_id]:
                if record.root:
                    self.save(record.forgotten())

    def _drop_oldest(self) -> None:
        key, _ = self._records.popitem(last=False)
        if self._folder is not None:
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: RecordKey) -> Path:
        assert self._folder is not None
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return self._folder / f"{name}{_SUFFIX}"

    def _load(self, path: Path) -> None:
        try:
            fields = json.loads(path.read_bytes())
            peers = {int(c): PeerKeys(**keys) for c, keys in fields.pop("neighbours").items()}
            fields["spec"] = SecureAggregation(**fields["spec"])
            for name in ("members", "routed", "survivors"):
                fields[name] = tuple(fields[name])
            record = RoundRecord(**fields, neighbours=peers)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            log.warning("a secure round's record cannot be read: its keys are lost", file=str(path))
            return
        self._records[record.key] = record


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Signatures ----
#
# A worker signs with the key of its certificate. It believes a certificate that is of a worker of
# its own trust domain, that an authority it knows has issued, and, where its site names the
# consortium's certificates or an authority of its own, that is one of those. Without certificates
# each client has an Ed25519 key for the round, which proves no more than that one and the same has
# signed: such a federation trusts its coordinator to follow the protocol.

_PSS: Final = padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)
_MAX_LINKS: Final = 8
_RAW_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class SignedIdentity:
    """The signer's identity: a certificate with its chain, in DER, or a raw public key."""

    identity: bytes
    issuers: tuple[bytes, ...] = ()


class WorkerSigner:
    """Signs as the worker, and checks others' identities. Files are read at each use, since
    certificates are renewed while a worker runs."""

    def __init__(self, tls: TlsFiles | None = None, revoked: RevokedFile | None = None) -> None:
        self._tls, self._revoked = tls, revoked

    def identity(self, root: bytes) -> SignedIdentity:
        """Return the identity with which others verify this worker's signatures. root: the root of
        the client's secrets, from which the signing key is derived if there is no certificate."""
        if self._tls is None:
            return _own_identity(root)
        return _identity_of(self._tls, self._tls.read())

    def sign(self, root: bytes, text: bytes) -> tuple[SignedIdentity, bytes]:
        """Return a signature of the text, and the identity to verify it with: consistent even if
        the certificate is renewed meanwhile."""
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
        """Check another client's identity. Raises InvalidInputError or UnauthenticatedError if it
        is not accepted. pins: the site's pinned workers; None if it pins none."""
        if self._tls is None and pins is None:
            if len(signed.identity) != _RAW_KEY_BYTES:
                raise InvalidInputError(f"{who} has no Ed25519 key, and there are no certificates")
            return
        if self._tls is None:
            raise InvalidInputError("peers are pinned, and this worker has no certificates")
        leaf = _certificate(who, signed.identity)
        between = [_certificate(who, issuer) for issuer in signed.issuers[:_MAX_LINKS]]
        identity = self._tls.identity()
        authorities = certificates_in("tls_ca", self._tls.ca)
        now = datetime.now(UTC)
        if not _is_issued(leaf, between, authorities, now):
            raise InvalidInputError(
                f"{who}: no authority of this worker has issued its certificate"
            )
        cert_id = CertId.from_uris(uris_of(leaf))
        if cert_id.role is not Role.WORKER or cert_id.trust_domain != identity.trust_domain:
            raise InvalidInputError(
                f"{who}: its certificate is of {cert_id}, and of no worker here"
            )
        if self._revoked is not None:
            self._revoked.check(cert_id, leaf.public_bytes(Encoding.PEM))
        if pins is not None and not _is_pinned(leaf, between, pins, now):
            text = "its certificate is none of the consortium's that the site names"
            raise InvalidInputError(f"{who}: {text}")


def is_signed_by(identity: bytes, signature: bytes, text: bytes) -> bool:
    """Return whether the text was signed by the holder of this accepted identity."""
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
    leaf, *issuers = [cert.public_bytes(Encoding.DER) for cert in chain]
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
    authorities = [x509.load_der_x509_certificate(der) for der in pins.authorities]
    return _is_issued(leaf, between, authorities, now)


def _is_issued(
    leaf: x509.Certificate,
    between: Sequence[x509.Certificate],
    authorities: Sequence[x509.Certificate],
    now: datetime,
) -> bool:
    """Return whether a valid chain of certificates leads from an authority to the leaf."""
    current = leaf
    for _ in range(_MAX_LINKS):
        if not current.not_valid_before_utc <= now <= current.not_valid_after_utc:
            return False
        if any(_has_issued(issuer, current) and _counts(issuer, now) for issuer in authorities):
            return True
        above = [cert for cert in between if cert != current and _has_issued(cert, current)]
        if not above:
            return False
        current = above[0]
    return False


def _counts(authority: x509.Certificate, now: datetime) -> bool:
    return authority.not_valid_before_utc <= now <= authority.not_valid_after_utc


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Return whether `issuer` has issued the certificate, and is allowed to."""
    try:
        limits = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.verify_directly_issued_by(issuer)
    except (x509.ExtensionNotFound, InvalidSignature, ValueError, TypeError):
        return False
    return limits.ca

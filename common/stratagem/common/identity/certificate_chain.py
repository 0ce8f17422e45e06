"""Finds until when a certificate counts: its own end, and that of every authority above it.

An authority that has ended takes all with it that it has signed, whatever stands in that. Owns how
the certificates above one are found, and the sentence that names the one that has ended. Reads no
file and verifies no peer: gRPC does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # its import takes 0.1 s, which a process without certificates need not wait for
    from cryptography import x509

_MAX_LINKS: Final = 8
AUTHORITY: Final = "authority"
"""What stands for the role of a certificate that signs others."""


@dataclass(frozen=True, slots=True)
class ChainCertificate:
    """A certificate of a chain, and the file that it was read from."""

    file: str
    """Where it stands."""
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
"""From the holder's own certificate up, as far as it is known."""


def chain_of(
    whose: str,
    certificates: Sequence[x509.Certificate],
    ca_file: str,
    authorities: Sequence[x509.Certificate],
) -> Chain:
    """whose: the file of the first certificate, and of those between it and the authorities."""
    current = certificates[0]
    links = [_link(whose, current, is_authority=False)]
    known = [(whose, certificate) for certificate in certificates[1:]]
    known += [(ca_file, authority) for authority in authorities]
    while len(links) < _MAX_LINKS and current.issuer != current.subject:
        signers = [(file, signer) for file, signer in known if has_signed(signer, current)]
        if not signers:
            break
        # Of two for the same key the later end counts, as it does for a verifier.
        file, current = max(signers, key=lambda signer: signer[1].not_valid_after_utc)
        links.append(_link(file, current, is_authority=True))
    return tuple(links)


def ended(chain: Chain) -> ChainCertificate | None:
    """The certificate that keeps the chain from counting; None while all of it counts.

    The highest: what is newly signed below it would not count either.
    """
    return next((link for link in reversed(chain) if link.has_ended), None)


def first_to_end(chain: Chain) -> ChainCertificate | None:
    """Return the certificate whose end ends the chain; the highest of several."""
    return min(reversed(chain), key=lambda link: link.ends, default=None)


def said(link: ChainCertificate, signed: str) -> str:
    """Say that a certificate has expired, and the remedy; `signed` names what it has signed."""
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
    """Return whether the authority has signed the certificate."""
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True

"""Certificates that count no more although they have not run out: a file, read again as it changes.

    worker w3                 # any holder of a certificate of worker w3, also a renewed one
    worker *.gpu              # the certificate that the workers of the pool gpu share
    sha256:9f86d0...          # this one certificate

Owns the file's form. Fails closed: a file that cannot be read ends a process at its start, and
later leaves the list as it was.
"""

import hashlib
import re
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import InvalidInputError, UnauthenticatedError
from stratagem.common.files.atomic_file import whole_file
from stratagem.common.files.watched_file import WatchedFiles
from stratagem.common.identity.tls_files import CertId, Role

_FINGERPRINT: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HOLDER: Final = re.compile(rf"({'|'.join(Role)}) (\*\.)?[A-Za-z0-9._-]{{1,64}}")


def fingerprint(pem: bytes) -> str:
    """Return the fingerprint of a certificate: the SHA-256 of its DER form."""
    der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


def check_entry(entry: str) -> str:
    """An entry of the file; InvalidInputError when it names no holder."""
    if not (_FINGERPRINT.fullmatch(entry) or _HOLDER.fullmatch(entry)):
        roles = ", ".join(f"`{role} NAME`" for role in Role)
        raise InvalidInputError.at("revoked", f"{entry!r} is neither {roles} nor `sha256:HEX`")
    return entry


def read_revoked(path: Path) -> frozenset[str]:
    """The entries of a file. InvalidInputError names the line that cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError.at("revoked_file", f"{path}: {error}") from None
    revoked = set()
    for number, line in enumerate(lines, start=1):
        entry = " ".join(line.partition("#")[0].split())
        try:
            revoked |= {check_entry(entry)} if entry else set()
        except InvalidInputError as error:
            reason = f"{path}, line {number}: {error.violations[0].message}"
            raise InvalidInputError.at("revoked_file", reason) from None
    return frozenset(revoked)


def add_revoked(path: Path, entries: Iterable[str]) -> None:
    """Add to a file, in one rename; it is made where it is not there."""
    known = read_revoked(path) if path.exists() else frozenset()
    new = [entry for entry in entries if check_entry(entry) not in known]
    before = path.read_text() if path.exists() else ""
    before += "" if before.endswith("\n") or not before else "\n"
    with whole_file(path) as file:
        file.write((before + "".join(f"{entry}\n" for entry in new)).encode())


class RevokedFile:
    """The revocation list of a process, read from a file."""

    def __init__(self, path: Path) -> None:
        """InvalidInputError when the file cannot be used now."""
        self._file = WatchedFiles(
            [path],
            lambda: read_revoked(path),
            unusable="the revoked certificates stay as they were",
            renewed="revoked certificates read again",
        )

    def check(self, cert_id: CertId, pem: bytes) -> None:
        """UnauthenticatedError for a caller whose certificate counts no more."""
        entries = self._file.newest()
        if entries and (str(cert_id) in entries or fingerprint(pem) in entries):
            raise UnauthenticatedError(f"the certificate of {cert_id} has been revoked")

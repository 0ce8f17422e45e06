"""The secret of private runs: 32 random bytes, from which draws and noise are derived.

It is read from a file that the operator keeps, never stored with the runs, and never in a journal,
a blob, a log or a reply: whoever has it can compute the noise and subtract it. The journal has its
fingerprint, so that a run is not continued with another one, whose noise would differ for the same
round and could be averaged away.
"""

import os
import threading
from hashlib import sha256
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import InvalidInputError, StratagemError
from stratagem.common.files.atomic_file import whole_file
from stratagem.common.files.private_file import check_private
from stratagem.common.privacy.gaussian_noise import SECRET_BYTES, derived_key

SETTING: Final = "privacy_secret"
_OF_ALL: Final = (
    "with a journal in PostgreSQL every coordinator needs the same secret: start them with "
    "--privacy-secret FILE, made by head -c 32 /dev/urandom"
)


class SecretLostError(StratagemError):
    """The secret of a run is not here; the sentence says what to do."""


class PrivacySecret:
    """The secret in a file, which is read when it is needed, in a thread."""

    def __init__(
        self, path: Path | None, *, may_make: bool = False, missing: str = _OF_ALL
    ) -> None:
        """path: None where none is named and none may be made, with what is to be done then."""
        self._path = path
        self._may_make, self._missing = may_make, missing
        self._making = threading.Lock()

    def check_usable(self) -> None:
        """Raise InvalidInputError where a private run could not have its secret."""
        if self._path is None:
            raise InvalidInputError.at(SETTING, f"missing; {self._missing}")
        if self._path.exists() or not self._may_make:
            self._read()

    def get(self, fingerprint: str) -> bytes:
        """Return the secret; made now where there is none and no run has used one.

        fingerprint: of the secret that the run has used; empty before its first round. Raises
        SecretLostError where that is another one.
        """
        self.check_usable()
        assert self._path is not None
        with self._making:  # of two runs that begin together one would have another secret
            if not self._path.exists() and not fingerprint:
                self._make()
        if not self._path.exists():
            raise SecretLostError(f"the privacy secret is lost: {self._path} is not there; {_CURE}")
        secret = self._read()
        if fingerprint and fingerprint_of(secret) != fingerprint:
            text = f"{self._path} has the fingerprint {fingerprint_of(secret)}"
            raise SecretLostError(
                f"the privacy secret is another one than the run's, {fingerprint}: {text}; {_CURE}"
            )
        return secret

    def _make(self) -> None:
        assert self._path is not None
        with whole_file(self._path, mode=0o600) as file:
            file.write(os.urandom(SECRET_BYTES))

    def _read(self) -> bytes:
        assert self._path is not None
        check_private(SETTING, self._path)
        secret = self._path.read_bytes()
        if len(secret) != SECRET_BYTES:
            text = f"{self._path} has {len(secret)} bytes and must have {SECRET_BYTES} random ones"
            raise InvalidInputError.at(SETTING, text)
        return secret


_CURE: Final = "put that file back, then resume the run, which would else spend twice for one round"


def fingerprint_of(secret: bytes) -> str:
    """Return what tells secrets apart and says nothing of them."""
    return derived_key(secret, ["fingerprint"]).hex()[:16]


def seeded_secret(seed: int) -> bytes:
    """Return the secret of a run with noise: seeded, which everybody can compute."""
    return sha256(f"not private/{seed}".encode()).digest()

"""Draw Gaussian noise from a key: the same key gives the same noise, any part of it at any time."""

import math
import os
import threading
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from stratagem.common.base.errors import InvalidInputError, StratagemError
from stratagem.common.base.files import check_private, whole_file

# ---- Noise ----
#
#     key   = HKDF-SHA256(secret, info = the names of what is noised, such as run, round and tensor)
#     block = AES-256(key, index of the element), 128 bits
#     noise = sqrt(-2 ln u1) · cos(2π u2), u1 in (0, 1] and u2 in [0, 1) of 53 bits each
#
# The last line is the Box-Muller transform. Without the secret the noise cannot be told from
# fresh noise, while work that a crash has interrupted is repeated with its own noise: there is
# never a second draw of which an average could be taken. Sums are rounded to a grid after the
# noise, so the result does not contain the last bits of floating-point arithmetic, which depend
# on the values (https://www.microsoft.com/en-us/research/publication/
# on-significance-of-the-least-significant-bits-for-differential-privacy/).

Floats = NDArray[np.float64]

SECRET_BYTES: Final = 32
GRID_BITS: Final = 20
"""The fineness of a noised sum's grid: the largest power of two that is at most sigma · 2^-20."""

_BLOCK_BYTES: Final = 16
_PIECE: Final = 1 << 16
"""The number of elements of noise generated at once; they fit in the cache."""


def derived_key(secret: bytes, names: Sequence[str]) -> bytes:
    """Derive a key from the secret and these names; different names give independent keys."""
    info = b"".join(len(name.encode()).to_bytes(8, "big") + name.encode() for name in names)
    return HKDF(SHA256(), length=32, salt=b"stratagem noise", info=info).derive(secret)


def standard_normal(key: bytes, start: int, num: int) -> Floats:
    """Return elements `start` to `start + num` of a key's endless N(0, 1) sequence."""
    normal = np.empty(num)
    for begin in range(0, num, _PIECE):
        piece = normal[begin : begin + _PIECE]
        first, second = _uniforms(key, start + begin, piece.size)
        np.subtract(1.0, first, out=first)  # no logarithm of zero
        np.sqrt(-2.0 * np.log(first), out=first)
        np.multiply(first, np.cos(2.0 * math.pi * second), out=piece)
    return normal


def uniform(key: bytes, start: int, num: int) -> Floats:
    """Return elements of a key's endless sequence of uniforms in [0, 1); the key must not be used
    for noise."""
    return _uniforms(key, start, num)[0]


def rounded_to_grid(values: Floats, sigma: float) -> Floats:
    """Round noised sums to multiples of a power of two (the grid), which follows from sigma."""
    grid = 2.0 ** (math.floor(math.log2(sigma)) - GRID_BITS)
    return np.rint(values / grid) * grid


def _uniforms(key: bytes, start: int, num: int) -> tuple[Floats, Floats]:
    """Return two arrays of uniforms in [0, 1), one of each per cipher block from `start` on."""
    cipher = Cipher(AES256(key), CTR(start.to_bytes(_BLOCK_BYTES, "big"))).encryptor()
    stream = cipher.update(bytes(num * _BLOCK_BYTES))
    bits = np.frombuffer(stream, "<u8").reshape(num, 2) >> np.uint64(11)
    pair = bits.astype(np.float64) * 2.0**-53
    return np.ascontiguousarray(pair[:, 0]), np.ascontiguousarray(pair[:, 1])


# ---- Secret ----
#
# The secret of private runs is 32 random bytes, from which draws and noise are derived.
#
# It is read from a file that the operator keeps. It is never stored with the runs, nor in a
# journal, a blob, a log or a reply: whoever has it can compute the noise and subtract it. The
# journal has its fingerprint, so a run is not continued with another secret, whose noise would
# differ for the same round and could be averaged away.

SETTING: Final = "privacy_secret"
_OF_ALL: Final = (
    "with a journal in PostgreSQL every coordinator needs the same secret: start them with "
    "--privacy-secret FILE, made by head -c 32 /dev/urandom"
)


class SecretLostError(StratagemError):
    """The privacy secret of a run is missing or another one; the message says what to do."""


class PrivacySecret:
    """The file with a coordinator's privacy secret, read in a thread when needed."""

    def __init__(
        self, path: Path | None, *, may_make: bool = False, missing: str = _OF_ALL
    ) -> None:
        """Take the path of the secret; None if none is configured and none may be made. missing:
        the advice in the error if a run needs it."""
        self._path = path
        self._may_make, self._missing = may_make, missing
        self._making = threading.Lock()

    def check_usable(self) -> None:
        """Raise InvalidInputError if a run with differential privacy could not get the secret."""
        if self._path is None:
            raise InvalidInputError.at(SETTING, f"missing; {self._missing}")
        if self._path.exists() or not self._may_make:
            self._read()

    def get(self, fingerprint: str) -> bytes:
        """Return the secret; make it if there is none and no run has used one.

        fingerprint: identifies the secret that the run has used; empty before its first round.
        Raises SecretLostError if the secret differs.
        """
        self.check_usable()
        assert self._path is not None
        with self._making:  # two runs that begin together must have the same secret
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
    """Return a digest that identifies a secret without revealing anything about it."""
    return derived_key(secret, ["fingerprint"]).hex()[:16]


def seeded_secret(seed: int) -> bytes:
    """Return the public secret of a run with `noise: seeded`, which everybody can compute."""
    return sha256(f"not private/{seed}".encode()).digest()

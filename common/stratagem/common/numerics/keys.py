"""Derive random numbers from (seed, place), so they are the same on every machine and device."""

import hashlib
import zlib
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

# ---- Counter-based random numbers ----
#
# `lowbias32` is a bijection of 32-bit words with little bias
# (https://nullprogram.com/blog/2018/07/31/). Nothing is drawn in an order, so any part of a
# tensor can be computed alone.

Words = NDArray[np.uint32]

SIGN_SALT: Final = 0x9E3779B9
_WORD: Final = 0xFFFFFFFF


def lowbias32(x: Words) -> Words:
    """Mix the bits of each word (the hash lowbias32). x: uint32, not modified."""
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def hash32(seed: int, places: Words) -> Words:
    """Return one 32-bit hash per place, from the seed and the place."""
    return lowbias32(lowbias32(places) ^ np.uint32(seed))


def uniform(seed: int, places: Words) -> NDArray[np.float32]:
    """Return one random float32 per place, in [0, 1), multiples of 2^-24."""
    bits = (hash32(seed, places) >> np.uint32(8)).astype(np.float32)
    return bits * np.float32(2.0**-24)


def derive(seed: int, *parts: int) -> int:
    """Derive a 32-bit seed from a seed and whole numbers >= 0 of any size."""
    words = [seed & _WORD]
    for part in (seed >> 32, *parts):
        while part > _WORD:
            words.append(part & _WORD)
            part >>= 32
        words.append(part)
    state = 0
    for word in words:
        state = int(hash32(state, np.array([word], np.uint32))[0])
    return state


def name_seed(name: str) -> int:
    """Return the 32-bit seed of a name, the same in every process."""
    return zlib.crc32(name.encode())


def places(num: int) -> Words:
    """Return the numbers 0 to num - 1, modulo 2^32, as input for the hash."""
    if num > _WORD:
        return np.arange(num, dtype=np.uint64).astype(np.uint32)
    return np.arange(num, dtype=np.uint32)


# ---- Mixed keys ----
#
# A key names a computation by numbers and words, and its random numbers depend on nothing else.

Key: TypeAlias = tuple[int | str, ...]

POSITIVE: Final = (1 << 63) - 1
"""A mask that makes 64-bit hashes valid seeds for torch."""
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def mix(*values: int | str) -> int:
    """Hash the values and their order to 64 well-mixed bits (splitmix64 steps)."""
    return mix_on(0, *values)


def mix_on(state: int, *values: int | str) -> int:
    """Continue the hash of `mix` with more values: `mix(a, b)` equals `mix_on(mix(a), b)`."""
    for value in values:
        number = text_number(value) if isinstance(value, str) else value
        state = (state + (number & _MASK) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@lru_cache(maxsize=1024)
def text_number(text: str) -> int:
    """Hash a text to 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

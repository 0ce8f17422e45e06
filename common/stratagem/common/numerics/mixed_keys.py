"""Keys of random numbers: what is drawn depends on what is computed, named by numbers and words.

Must not know generators.
"""

import hashlib
from functools import lru_cache
from typing import Final, TypeAlias

Key: TypeAlias = tuple[int | str, ...]

POSITIVE: Final = (1 << 63) - 1
"""Mask of what torch takes for a seed."""
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def mix(*values: int | str) -> int:
    """Hashes the values and their order to 64 well-mixed bits (splitmix64 steps)."""
    return mix_on(0, *values)


def mix_on(state: int, *values: int | str) -> int:
    """Hashes more values to what `mix` has made of those before: `mix(a, b)` is
    `mix_on(mix(a), b)`."""
    for value in values:
        number = text_number(value) if isinstance(value, str) else value
        state = (state + (number & _MASK) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@lru_cache(maxsize=1024)
def text_number(text: str) -> int:
    """Hashes a text to 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

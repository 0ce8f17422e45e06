"""Shamir's secret sharing over the integers modulo 2^521 - 1.

A secret is the value at zero of a polynomial of degree t - 1; a share is its value at another
place. Any t shares give the secret, and fewer say nothing at all of it. Source: Shamir 1979, How to
share a secret. Pure functions; where the coefficients come from is the caller's matter.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

PRIME: Final = 2**521 - 1
SHARE_BYTES: Final = 66
COEFFICIENT_BYTES: Final = 72
"""Random bytes of a coefficient: reduced modulo the prime they are uniform up to 2^-55."""


def share(secret: bytes, places: Sequence[int], threshold: int, random: bytes) -> dict[int, bytes]:
    """Return the share of each place. places: different numbers from 1 on. random: the bytes of
    threshold - 1 coefficients."""
    if len(random) != (threshold - 1) * COEFFICIENT_BYTES:
        raise ValueError(f"{len(random)} bytes are not {threshold - 1} coefficients")
    if min(places) < 1 or len(set(places)) != len(places) or not 1 <= threshold <= len(places):
        raise ValueError(f"{threshold} of the places {list(places)} is no sharing")
    starts = range(0, len(random), COEFFICIENT_BYTES)
    chosen = [int.from_bytes(random[at : at + COEFFICIENT_BYTES], "big") % PRIME for at in starts]
    coefficients = [int.from_bytes(secret, "big"), *chosen]
    return {place: _value(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places}


def _value(coefficients: Sequence[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


def reconstruct(shares: Mapping[int, bytes], threshold: int, num_bytes: int) -> bytes:
    """Return the secret of that many bytes from shares by their places.

    Raises ValueError where there are fewer than the threshold, or where they are of no such secret.
    """
    places = tuple(sorted(shares)[:threshold])
    if len(places) < threshold:
        raise ValueError(f"{len(places)} shares are fewer than {threshold}")
    values = (int.from_bytes(shares[place], "big") for place in places)
    factors = _factors_at_zero(places)
    secret = sum(value * factor for value, factor in zip(values, factors, strict=True)) % PRIME
    try:
        return secret.to_bytes(num_bytes, "big")
    except OverflowError:
        raise ValueError("the shares are of no secret of this size") from None


@lru_cache(maxsize=64)
def _factors_at_zero(places: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's factors at zero; the secrets of a round mostly have the same places."""
    factors = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)

"""Split secrets into shares by Shamir's scheme, and choose the neighbours that hold the shares."""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

# ---- Shamir's secret sharing ----
#
# The scheme works over the integers modulo 2^521 - 1. A secret is the value at zero of a
# polynomial of degree t - 1; a share is its value at another place. Any t shares give the secret,
# and fewer reveal nothing about it (Shamir 1979, How to share a secret). The functions are pure;
# the caller provides the coefficients.

PRIME: Final = 2**521 - 1
SHARE_BYTES: Final = 66
COEFFICIENT_BYTES: Final = 72
"""The random bytes per polynomial coefficient: modulo the prime, uniform up to 2^-55."""


def share(secret: bytes, places: Sequence[int], threshold: int, random: bytes) -> dict[int, bytes]:
    """Split a secret into one share per place, `threshold` of which recover it. places: different
    numbers from 1 on. random: the bytes of threshold - 1 coefficients."""
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
    """Recover a secret of num_bytes from shares keyed by place. Raises ValueError if there are
    fewer than the threshold, or they do not belong to one secret."""
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
    """Return Lagrange's coefficients at zero; cached, since most secrets have the same places."""
    factors = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)


# ---- Neighbours ----
#
# The neighbours of a client share its secrets. This section also determines how many shares open
# a secret, and whose secrets can be opened.
#
# Up to 64 clients everybody is a neighbour of everybody; beyond, each has `degree` neighbours on
# a ring in random order, half on either side (Bell et al. 2020,
# https://eprint.iacr.org/2020/704). The holders of a client's secrets are its neighbours and
# itself. The functions are pure.

AUTO: Final = "auto"
MAX_COMPLETE: Final = 64
"""The largest number of clients that are all neighbours of each other under `auto`."""
AUTO_DEGREE: Final = 100
MIN_CLIENTS: Final = 3
"""The smallest number of clients: of two, each would learn the other's update from the sum."""
RING_SEED_BYTES: Final = 32


def num_neighbours(num_clients: int, degree: int | str) -> int:
    """Return the number of neighbours per client, `degree` or at most all others; on a ring an odd
    number is rounded up."""
    others = num_clients - 1
    if degree == AUTO:
        return others if num_clients <= MAX_COMPLETE else min(others, AUTO_DEGREE)
    number = int(degree)
    return others if number >= others else min(others, number + number % 2)


def is_complete(num_clients: int, degree: int | str) -> bool:
    """Return whether all clients are neighbours of each other (hold each other's shares)."""
    return num_neighbours(num_clients, degree) == num_clients - 1


def neighbours(
    members: Collection[int], degree: int | str, ring_seed: bytes
) -> Mapping[int, tuple[int, ...]]:
    """Return each client's neighbours, ascending, on a ring that ring_seed has shuffled."""
    number = num_neighbours(len(members), degree)
    if number == len(members) - 1:
        everybody = sorted(members)
        return {client: tuple(c for c in everybody if c != client) for client in everybody}
    ring = sorted(members, key=lambda client: (_draw(ring_seed, client), client))
    steps = [step for step in range(-number // 2, number // 2 + 1) if step]
    return {
        client: tuple(sorted(ring[(place + step) % len(ring)] for step in steps))
        for place, client in enumerate(ring)
    }


def _draw(ring_seed: bytes, client: int) -> bytes:
    return hashlib.sha256(ring_seed + client.to_bytes(8, "big")).digest()


def shares_needed(threshold: float, num_holders: int) -> int:
    """Return t, the number of shares that recover a secret: more than the fraction `threshold` of
    its holders."""
    return min(num_holders, math.floor(threshold * num_holders + 1e-9) + 1)


def never_opened(
    neighbours_of: Mapping[int, Sequence[int]],
    routed: Iterable[int],
    survivors: Collection[int],
    threshold: float,
) -> list[int]:
    """Return the clients whose secrets cannot be recovered, as too few holders of their shares
    survive; the sum cannot be unmasked without them."""
    return [
        client
        for client in routed
        if _num_left(client, neighbours_of[client], survivors)
        < shares_needed(threshold, len(neighbours_of[client]) + 1)
    ]


def _num_left(client: int, others: Sequence[int], survivors: Collection[int]) -> int:
    return sum(other in survivors for other in others) + (client in survivors)

"""Any t shares give the secret; fewer are refused, and say nothing of it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.privacy.sharing import (
    COEFFICIENT_BYTES,
    PRIME,
    SHARE_BYTES,
    reconstruct,
    share,
)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.data())
def test_any_t_shares_give_the_secret(secret: bytes, num: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, num))
    places = data.draw(st.lists(st.integers(1, 10_000), min_size=num, max_size=num, unique=True))
    random = data.draw(st.binary(min_size=0, max_size=0)) + os.urandom(
        (threshold - 1) * COEFFICIENT_BYTES
    )
    shares = share(secret, places, threshold, random)
    chosen = data.draw(st.permutations(places))[:threshold]
    assert {len(each) for each in shares.values()} == {SHARE_BYTES}
    assert reconstruct({place: shares[place] for place in chosen}, threshold, 32) == secret


def test_fewer_shares_are_of_every_secret_and_are_refused() -> None:
    """With t - 1 shares each secret has one polynomial, so none is more likely than another."""
    shares = share(b"\1" * 32, [1, 2, 3], 3, os.urandom(2 * COEFFICIENT_BYTES))
    first, second = (int.from_bytes(shares[place], "big") for place in (1, 2))
    for other in (0, 7, PRIME - 1):
        third = (other - 3 * first + 3 * second) % PRIME
        forged = {**shares, 3: third.to_bytes(SHARE_BYTES, "big")}
        assert int.from_bytes(reconstruct(forged, 3, SHARE_BYTES), "big") == other
    shares = share(b"\2" * 32, [1, 2, 3], 3, os.urandom(2 * COEFFICIENT_BYTES))
    with pytest.raises(ValueError, match="2 shares are fewer than 3"):
        reconstruct({1: shares[1], 2: shares[2]}, 3, 32)
    with pytest.raises(ValueError, match="no secret"):
        reconstruct({**shares, 3: bytes(SHARE_BYTES)}, 3, 32)


@pytest.mark.parametrize("places", [[0, 1], [1, 1], [1]])
def test_places_must_be_different_numbers_from_one_on(places: list[int]) -> None:
    with pytest.raises(ValueError, match="no sharing"):
        share(b"", places, 2, bytes(COEFFICIENT_BYTES))
    with pytest.raises(ValueError, match="not 1 coefficients"):
        share(b"", [1, 2], 2, b"")

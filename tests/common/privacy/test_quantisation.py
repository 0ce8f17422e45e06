"""Changes become whole numbers whose sum is exact, and any part of a mask can be made alone."""

from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.privacy.masks import apply_mask
from stratagem.common.privacy.quantisation import Quantisation

KEY = bytes(range(32))


def quantised(rule: Quantisation, changes: list[float], weight: int = 1) -> np.ndarray:
    words = np.zeros(len(changes), rule.word)
    rule.quantise(np.array(changes, np.float64), weight, words)
    return words


def test_a_change_is_clipped_and_a_sum_beyond_64_bits_or_still_masked_refused() -> None:
    rule = Quantisation(clip=7.0, bits=4, num_clients=3)
    words = quantised(rule, [0.0, 0.5, 1.5, -2.5, 9.0, -9.0])
    assert words.view("<i4").tolist() == [0, 0, 2, -2, 7, -7]
    with pytest.raises(InvalidInputError, match="does not fit into 64 bits"):
        Quantisation(8.0, 32, 1 << 20, 1 << 20)
    rule = Quantisation(8.0, 20, 3)
    with pytest.raises(ValueError, match="range"):
        rule.mean(np.array([1 << 30], rule.word), 3)
    assert Quantisation(8.0, 20, 3).mean(np.zeros(0, "<u4"), 3).size == 0


@pytest.mark.parametrize(
    ("clients", "weight", "bits", "word"),
    [
        (4096, 1, 20, "<u4"),
        (4097, 1, 20, "<u8"),
        (3, 1, 32, "<u8"),
        (3, 1000, 20, "<u4"),
        (10, 1000, 20, "<u8"),
    ],
)
def test_the_modulus_just_holds_the_sum(clients: int, weight: int, bits: int, word: str) -> None:
    assert Quantisation(8.0, bits, clients, weight).word == np.dtype(word)


@given(
    st.integers(2, 32),
    st.lists(st.lists(st.floats(-20, 20), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 1000),
)
def test_the_mean_of_sums_is_exact(bits: int, changes: list[list[float]], weight: int) -> None:
    rule = Quantisation(8.0, bits, len(changes), weight)
    total = np.zeros(3, rule.word)
    exact = [Fraction(0)] * 3
    for change in changes:
        total += quantised(rule, change, weight)
        for place, value in enumerate(change):
            scaled = np.clip(np.float64(value), -8.0, 8.0) * rule.scale
            exact[place] += weight * int(np.rint(scaled))
    mean = rule.mean(total, weight * len(changes))
    divisor = rule.scale * (weight * len(changes))
    assert mean.tolist() == [float(each) / divisor for each in exact]


@pytest.mark.parametrize("word", ["<u4", "<u8"])
def test_a_mask_is_the_key_stream_of_aes_in_counter_mode(word: str) -> None:
    num = 70_001
    stream = Cipher(AES256(KEY), CTR(bytes(16))).encryptor().update(bytes(num * 8))
    words = np.full(num, 3, word)
    apply_mask(KEY, 0, words)
    assert np.array_equal(words, np.frombuffer(stream, word, num) + np.array(3, word))


@given(st.integers(0, 100), st.integers(0, 60), st.sampled_from(["<u4", "<u8"]))
def test_any_part_of_a_mask_is_that_of_the_whole(start: int, num: int, word: str) -> None:
    whole, part = np.zeros(200, word), np.zeros(num, word)
    apply_mask(KEY, 0, whole)
    apply_mask(KEY, start, part)
    assert np.array_equal(part, whole[start : start + num])


@pytest.mark.parametrize("num", [0, 1, 7, 1 << 16])
def test_what_one_adds_the_other_subtracts(num: int) -> None:
    words = np.arange(num).astype("<u4")
    apply_mask(KEY, 5, words)
    apply_mask(KEY, 5, words, subtract=True)
    assert np.array_equal(words, np.arange(num))

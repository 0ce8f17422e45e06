"""A mask is one sequence, of which any part can be made alone."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.secure_aggregation.mask_stream import apply_mask

KEY = bytes(range(32))


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

"""Masks: the endless sequence of pseudo-random words of a key, any part of it at any time.

    words = AES-256-CTR(key, counter from 0), as little-endian uint32 or uint64

A key is used for one mask of one round and for nothing else, so the counter begins at zero. Memory
is one piece, whatever the size of the model.
"""

from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from stratagem.common.secure_aggregation.quantisation import Words

_BLOCK_BYTES: Final = 16
_PIECE_BYTES: Final = 1 << 17
"""Bytes of a mask made at once: with the words that they are added to, they stay in the cache."""
_ZEROS: Final = bytes(_PIECE_BYTES)


def apply_mask(key: bytes, start: int, words: Words, *, subtract: bool = False) -> None:
    """Add the mask of a key, from its element `start` on, to the words; or subtract it.

    words: contiguous. key: 32 bytes.
    """
    item_bytes = words.dtype.itemsize
    block, skipped = divmod(start * item_bytes, _BLOCK_BYTES)
    cipher = Cipher(AES256(key), CTR(block.to_bytes(_BLOCK_BYTES, "big"))).encryptor()
    if skipped:
        cipher.update(_ZEROS[:skipped])
    num = _PIECE_BYTES // item_bytes
    buffer = bytearray(_PIECE_BYTES + _BLOCK_BYTES)
    for begin in range(0, words.size, num):
        piece = words[begin : begin + num]
        cipher.update_into(_ZEROS[: piece.nbytes], buffer)
        mask = np.frombuffer(buffer, words.dtype, piece.size)
        if subtract:
            piece -= mask
        else:
            piece += mask

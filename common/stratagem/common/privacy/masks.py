"""Make the masks of secure aggregation, and define the layout of a masked update."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from stratagem.common.privacy.quantisation import Quantisation, Words
from stratagem.common.tensors.manifest import (
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
    dtype_named,
)

# ---- Masks ----
#
# A mask is the endless sequence of pseudo-random words of a key, any part of it at any time:
#
#     words = AES-256-CTR(key, counter from 0), as little-endian uint32 or uint64
#
# A key is used for one mask of one round and for nothing else, so the counter begins at zero.
# Memory is one piece, whatever the size of the model.

_BLOCK_BYTES: Final = 16
_PIECE_BYTES: Final = 1 << 17
"""The size of the pieces in which masks are generated; a piece and its words fit in the cache."""
_ZEROS: Final = bytes(_PIECE_BYTES)


def apply_mask(key: bytes, start: int, words: Words, *, subtract: bool = False) -> None:
    """Add to the words, or subtract from them, the mask that is generated from a key, beginning
    with its element `start`. words: contiguous, modified in place. key: 32 bytes."""
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


# ---- Layout ----
#
# A masked update is one tensor: the floating elements of the model in the order of its bytes,
# then the weight. It omits integers and bools, and contains tied tensors once.

MASKED: Final = "masked"
"""The name of the only tensor of a masked update. Its type is the signed one of the words' size,
since the tensor stream has no unsigned types; the bits are the same."""


class MaskedLayout:
    """The layout of a masked update: which of its elements belongs to which tensor of the model."""

    def __init__(self, model: Manifest) -> None:
        specs = [spec for spec in model.stored() if dtype_named(spec.dtype).is_floating]
        sizes = [spec.size_bytes // dtype_named(spec.dtype).item_bytes for spec in specs]
        self._specs, self.num_elements = specs, sum(sizes)
        self._firsts = list(accumulate(sizes, initial=0))[:-1]
        self._offsets = np.array([spec.offset for spec in specs], np.int64)

    def tensors(self) -> Iterator[tuple[TensorSpec, int]]:
        """Yield each floating-point tensor with the index of its first element in the update."""
        yield from zip(self._specs, self._firsts, strict=True)

    def place(self, offset: int) -> int:
        """Return the index in the update of the element at this byte offset of the model's data."""
        index = int(np.searchsorted(self._offsets, offset, side="right")) - 1
        spec = self._specs[index]
        return self._firsts[index] + (offset - spec.offset) // dtype_named(spec.dtype).item_bytes

    def manifest(self, rule: Quantisation) -> Manifest:
        """Return the manifest of a masked update: its elements, then the client's weight."""
        dtype = f"int{8 * rule.word.itemsize}"
        return build_manifest([(MASKED, dtype, (self.num_elements + 1,))], Purpose.UPDATE)

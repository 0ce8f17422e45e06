"""What the operators must give, in numpy: by the definitions of the codecs, where these have one.

`stratagem.common.compression` codes what travels, in numpy; a message that one end makes on a
device must be the one that it would make there.
"""

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression import quantize, vsa
from stratagem.common.numerics import keys

Floats = NDArray[np.float32]


def signs(seed: int, numel: int) -> Floats:
    return vsa.signs_of(seed, keys.places(numel))


def deterministic(x: Floats, threshold: float) -> Floats:
    """-1, 0 or +1; no negative zero."""
    return np.sign(x) * (np.abs(x) > np.float32(threshold)) + np.float32(0)


def stochastic(x: Floats, scale: float, seed: int) -> Floats:
    noise = keys.uniform(seed, keys.places(x.size)) * np.float32(scale)
    return np.sign(x) * (noise < np.abs(x)) + np.float32(0)


def pack(trits: Floats) -> NDArray[np.uint8]:
    return quantize.pack(trits.astype(np.int8))


def tree_sum(numbers: list[float]) -> float:
    """By its definition, in Python's own floats."""
    if len(numbers) <= 1:
        return numbers[0] if numbers else 0.0
    pairs = zip(numbers[0::2], [*numbers[1::2], 0.0], strict=False)
    return tree_sum([left + right for left, right in pairs])


def sketch(x: Floats, size: int, seed: int) -> Floats:
    return vsa.Sketch(seed, x.size, size).project(x)


def unsketch(values: Floats, numel: int, seed: int, scale: float) -> Floats:
    return vsa.Sketch(seed, numel, values.size).transpose(values) * np.float32(scale)

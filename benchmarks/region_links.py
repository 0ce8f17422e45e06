"""Bytes that a region of sites sends over its long link: all updates, or the float64 sum of them.

    python benchmarks/region_links.py --parameters 1000000

A sum that is folded elsewhere with the same bits has to travel in float64, whatever the codec of
the updates. For each codec: the bytes of an update for each parameter, and the fewest sites whose
updates are more than one sum, as it is and deflated by planes of bytes. Updates are a state in
float32 and changes of a hundredth of it; rows are drawn from 50 to 2,000.
"""

import argparse
import math
import zlib

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression import TensorLayout, make_codec
from stratagem.common.job.compression import CompressionSpec

CODECS = ("none", "fp16", "int8", "int4", "ternary", "top_k")
ITEM_BYTES = 8
"""Of a sum."""


def summed(base: NDArray[np.float32], num_sites: int, rng: np.random.Generator) -> bytes:
    """The sum that a region of so many sites would send."""
    total = np.zeros(base.size)
    for _ in range(num_sites):
        change = 0.01 * base.std() * rng.standard_normal(base.size)
        update = base + change.astype(np.float32)
        total += float(rng.integers(50, 2001)) * update.astype(np.float64)
    return total.tobytes()


def deflated(data: bytes) -> int:
    """How many bytes are left of a sum: the n-th bytes of all elements are one stream."""
    planes = np.frombuffer(data, np.uint8).reshape(-1, ITEM_BYTES)
    return sum(len(zlib.compress(planes[:, n].tobytes(), 1)) for n in range(ITEM_BYTES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 10, 40])
    options = parser.parse_args()
    num, rng = options.parameters, np.random.default_rng(0)
    base = (0.05 * rng.standard_normal(num)).astype(np.float32)
    small = [deflated(summed(base, sites, rng)) / num for sites in options.sites]
    for sites, size in zip(options.sites, small, strict=True):
        print(f"sum of {sites} sites: {ITEM_BYTES} bytes a parameter, {size:.2f} deflated")
    print(f"{'updates':<9} {'bytes a parameter':>18} {'a sum is less from':>19} {'deflated':>9}")
    for name in CODECS:
        spec = CompressionSpec.model_validate(name)
        codec = make_codec(spec, [TensorLayout("w", (num,))], 0, with_feedback=False)
        size = codec.payload_bytes / num
        fewest = [math.floor(each / size) + 1 for each in (ITEM_BYTES, max(small))]
        print(f"{name:<9} {size:>18.2f} {fewest[0]:>13} sites {fewest[1]:>9}")


if __name__ == "__main__":
    main()

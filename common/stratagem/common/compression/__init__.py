"""Codecs for what goes over the wire: gradients of shards, updates of clients, moves of nodes.

These functions define the bits, on every device; numpy only, because the coordinator decodes too.

    make_codec     the codec of a job's `compression` for a layout
    codec.py       what a codec is; one file per codec next to it
    error_feedback.py    the residual that makes a biased codec exact over time
    tree_sums.py        sums in an order that every device can keep
    counter_random.py     random numbers that are a function of (seed, place)
"""

from stratagem.common.compression.codec import (
    ByteArray,
    Codec,
    FloatArray,
    Layout,
    NonFiniteError,
    State,
    TensorLayout,
)
from stratagem.common.compression.table import make_codec
from stratagem.common.numerics.keys import derive

__all__ = [
    "ByteArray",
    "Codec",
    "FloatArray",
    "Layout",
    "NonFiniteError",
    "State",
    "TensorLayout",
    "derive",
    "make_codec",
]

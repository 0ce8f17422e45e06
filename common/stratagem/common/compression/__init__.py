"""Codecs compress the data on the wire: gradients of shards, updates of clients, moves of nodes.
They define the bits on every device, and use numpy only, because the coordinator decodes too.
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

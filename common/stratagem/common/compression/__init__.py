"""Codecs compress the data on the wire: gradients of shards, updates of clients, changes of gossip
nodes. They define the bits on every device, and use numpy only, because the coordinator decodes
too.

- layout: the names and shapes of the tensors that a codec encodes
- extras: scalars, such as the weight, that travel uncoded with the gradient of a shard
- residual: what a lossy codec has not sent yet; error feedback adds it to the next payload
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

"""A step of coded shards, as both ends of a ParameterServer see it.

A *message* is the payload of one shard and then its extras (float64, never coded), the first of
which is its weight. What is coded of a shard is its mean gradient, which may be a number of the
codec's where mean · rows is none. Owns the rule which way the sum goes back, and the addition where
the coordinator decodes.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression.codec import Codec, FloatArray
from stratagem.common.numerics.batch_shards import Node, split_node
from stratagem.common.numerics.counter_random import derive


def are_forwarded(num_live: int, message_bytes: int, raw_bytes: int) -> bool:
    """Return whether the messages of all live shards are forwarded to every worker, rather than the
    sum of what they say. Fewer bytes decide; the bits are the same."""
    return num_live * message_bytes < raw_bytes


def unit(weight: float, numerics: int) -> float:
    """Return the number by which the gradient of a shard of this weight, a sum over its rows, is
    divided before it is coded, and multiplied afterwards. By the rules of `numerics` 1 the sum is
    coded."""
    return weight if numerics >= 2 and 0 < weight < math.inf else 1.0


def sum_messages(
    codec: Codec, messages: Sequence[bytes], seed: int, step: int, numerics: int
) -> tuple[FloatArray, NDArray[np.float64]]:
    """(sum of the decoded tensors, flat one after the other; sum of the extras), in the tree.

    messages: of the shards 0, 1, ... in order; their keys follow from seed, step and shard.
    Raises ValueError for a payload that no encoder can have made.
    """

    def total(node: Node) -> tuple[FloatArray, NDArray[np.float64]]:
        if node.stop - node.first == 1:
            data = np.frombuffer(messages[node.first], np.uint8)
            decoded = codec.decode(data[: codec.payload_bytes], derive(seed, step, node.first))
            extras = data[codec.payload_bytes :].copy().view("<f8").astype(np.float64)
            means = np.concatenate(decoded)
            return means * np.float32(unit(float(extras[0]), numerics)), extras
        (left, more), (right, others) = (total(half) for half in split_node(node))
        left += right
        more += others
        return left, more

    return total(Node(0, len(messages)))

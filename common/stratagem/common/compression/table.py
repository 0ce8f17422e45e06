"""Make the codec that a job's `compression` names, and apply it to shards and to clients' updates.

No other module knows all codecs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression.codec import (
    Codec,
    ErrorFeedback,
    FloatArray,
    Layout,
    PerTensor,
    Plain,
    TensorCodec,
    TensorLayout,
)
from stratagem.common.compression.low_rank import LowRank
from stratagem.common.compression.quantize import BrainFloat, Half, Int8, ScaledBlocks, Ternary
from stratagem.common.compression.top_k import TopK
from stratagem.common.compression.vsa import Vsa, VsaBesidePlain, places_beside
from stratagem.common.job import JobSpec
from stratagem.common.job.compression import BLOCK, CompressionSpec
from stratagem.common.numerics.keys import derive
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.numerics.shards import Node, split_node
from stratagem.common.tensors.manifest import TensorSpec

# ---- Table of codecs ----


def make_codec(
    spec: CompressionSpec,
    layout: Layout,
    seed: int,
    *,
    with_feedback: bool = True,
    numerics: int = CURRENT,
) -> Codec:
    """Return the codec of a section `compression` for a layout. seed: the job's seed; `spec.seed`
    takes precedence. with_feedback: add error feedback if the section asks; the caller must keep
    the residuals."""
    codec = _bare_codec(spec, layout, seed if spec.seed is None else spec.seed, numerics)
    return ErrorFeedback(layout, codec) if spec.has_feedback and with_feedback else codec


def _bare_codec(spec: CompressionSpec, layout: Layout, seed: int, numerics: int) -> Codec:
    match spec.codec:
        case "low_rank":
            return LowRank(layout, rank=spec.rank, seed=seed)
        case "vsa":
            fraction, inner = spec.dimension_fraction, spec.sketch_codec
            beside = places_beside(layout, fraction, numerics)
            others = [tensor for place, tensor in enumerate(layout) if place not in beside]
            bundled = Vsa(others, dimension_fraction=fraction, sketch_codec=inner)
            return VsaBesidePlain(layout, beside, bundled) if beside else bundled
        case _:
            make = _tensor_codec(spec)
            return PerTensor(layout, [make(tensor.numel) for tensor in layout])


def _tensor_codec(spec: CompressionSpec) -> Callable[[int], TensorCodec]:
    """Return a factory that makes the codec of one tensor from its number of elements."""
    match spec.codec:
        case "fp16":
            return Half
        case "bf16":
            return BrainFloat
        case "int8" | "int4" if spec.block is not None or spec.codec == "int4":
            bits, block = int(spec.codec.removeprefix("int")), spec.block or BLOCK
            return lambda numel: ScaledBlocks(numel, bits=bits, block=block)
        case "int8":
            return lambda numel: Int8(numel, stochastic=spec.stochastic)
        case "ternary":
            return lambda numel: Ternary(
                numel, threshold_fraction=spec.threshold_fraction, stochastic=spec.stochastic
            )
        case "top_k":
            return lambda numel: TopK(numel, k_fraction=spec.k_fraction)
        case "none":
            return Plain
        case _:
            raise AssertionError(f"codec {spec.codec!r} has no implementation here")


# ---- Coded steps ----
#
# Both ends of a ParameterServer use these rules for a step of coded shards.
#
# A *message* is the payload of one shard and then its extras (float64, never coded), the first of
# which is its weight. The coded value of a shard is its mean gradient, which may be in the range
# of the codec where mean · rows is not. The rules decide which way the sum goes back, and define
# the addition where the coordinator decodes.


def are_forwarded(num_live: int, message_bytes: int, raw_bytes: int) -> bool:
    """Return whether it takes fewer bytes to forward all shards' coded messages to every worker
    than to send the decoded sum; the result has the same bits either way."""
    return num_live * message_bytes < raw_bytes


def unit(weight: float, numerics: int) -> float:
    """Return the number (the shard's weight) by which a shard's gradient, a sum over its rows, is
    divided before encoding and multiplied after decoding; 1 under the numerics rules number 1."""
    return weight if numerics >= 2 and 0 < weight < math.inf else 1.0


def sum_messages(
    codec: Codec, messages: Sequence[bytes], seed: int, step: int, numerics: int
) -> tuple[FloatArray, NDArray[np.float64]]:
    """Decode and add the messages of all shards; return (sum of the flat tensors, sum of the
    extras), added in the tree order.

    messages: of the shards 0, 1, ... in order; their keys follow from seed, step and shard. Raises
    ValueError for a payload that no encoder can have made.
    """

    def total(node: Node) -> tuple[FloatArray, NDArray[np.float64]]:
        if node.stop - node.first == 1:
            data = np.frombuffer(messages[node.first], np.uint8)
            decoded = codec.decode(data[: codec.payload_bytes], derive(seed, step, node.first))
            extras = data[codec.payload_bytes :].copy().view("<f8").astype(np.float64)
            means = np.concatenate(decoded)
            return means * np.float32(unit(float(extras[0]), numerics)), extras
        (low, more), (high, others) = (total(half) for half in split_node(node))
        low += high
        more += others
        return low, more

    return total(Node(0, len(messages)))


# ---- Coded updates ----
#
# A federated client's update is coded as its change relative to the global state.
#
# On the wire it is one payload of all coded parameters, in order of name, and with it every other
# tensor uncoded. Clients keep nothing from round to round, so there is no residual.

PAYLOAD: Final = "payload"
"""The name of the tensor that holds a coded update; names of a model's tensors have a slash."""


def update_codec(
    job: JobSpec, coded: Iterable[TensorSpec], numerics: int
) -> tuple[Codec, list[str]]:
    """Return the codec for a federated client's update, and its tensors' names in coding order."""
    assert job.compression is not None
    layout = sorted(
        (TensorLayout(tensor.name, tensor.shape) for tensor in coded), key=lambda e: e.name
    )
    codec = make_codec(job.compression, layout, job.seed, with_feedback=False, numerics=numerics)
    return codec, [tensor.name for tensor in layout]


def update_key(job: JobSpec, round_num: int, client: int) -> int:
    """Return the random key for coding a client's update: unique, but stable over repetitions."""
    assert job.compression is not None
    seed = job.seed if job.compression.seed is None else job.compression.seed
    return derive(seed, round_num, client)

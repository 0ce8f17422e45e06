"""Layouts, values and codecs that the tests of this folder share."""

from typing import Any

import numpy as np

from stratagem.common.compression import Codec, FloatArray, TensorLayout, make_codec
from stratagem.common.job import CompressionSpec

ODD = (
    TensorLayout("weight", (7, 33)),
    TensorLayout("nothing", (0, 3)),
    TensorLayout("scalar", ()),
    TensorLayout("bias", (7,)),
    TensorLayout("kernel", (5, 3, 2, 11)),
)
CODECS: dict[str, Any] = {
    "none": {"codec": "none"},
    "fp16": {"codec": "fp16"},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8"},
    "int8-feedback": {"codec": "int8", "error_feedback": True},
    "int8-stochastic": {"codec": "int8", "stochastic": True},
    "int8-blocks": {"codec": "int8", "block": 16},
    "int4": {"codec": "int4"},
    "int4-feedback": {"codec": "int4", "block": 7, "error_feedback": True},
    "ternary": {"codec": "ternary"},
    "ternary-stochastic": {"codec": "ternary", "stochastic": True},
    "top_k": {"codec": "top_k", "k_fraction": 0.05},
    "top_k-bitmap": {"codec": "top_k", "k_fraction": 0.3},
    "low_rank": {"codec": "low_rank", "rank": 2},
    "vsa": {"codec": "vsa", "dimension_fraction": 0.3},
    "vsa-int8": {"codec": "vsa", "dimension_fraction": 0.3, "sketch_codec": "int8"},
    "vsa-ternary": {"codec": "vsa", "dimension_fraction": 0.5, "sketch_codec": "ternary"},
}


def codec_of(document: dict[str, Any], layout: tuple[TensorLayout, ...] = ODD) -> Codec:
    return make_codec(CompressionSpec.parse(document), layout, 3)


def values(layout: tuple[TensorLayout, ...], seed: int, scale: float = 1.0) -> list[FloatArray]:
    generator = np.random.default_rng(seed)
    return [(generator.standard_normal(spec.numel) * scale).astype(np.float32) for spec in layout]


def flat(tensors: list[FloatArray]) -> FloatArray:
    return np.concatenate(tensors)

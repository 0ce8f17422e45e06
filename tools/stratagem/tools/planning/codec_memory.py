"""Measures the memory that a codec takes of a worker by coding a small copy of the layout.

All codecs take memory in proportion to the elements, so a layout of the same proportions says how
much per element; a change to a codec need not change a formula here. Of codecs on the host.
"""

import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratagem.common.compression import Layout, TensorLayout, make_codec
from stratagem.common.job import CompressionSpec

_MAX_ELEMENTS: Final = 1 << 20
"""Of the small copy: coded in a fraction of a second."""


@dataclass(frozen=True, slots=True)
class CodecMemory:
    """The bytes that a codec takes for one shard."""

    payload: int
    state: int
    """What is kept from step to step: residuals, bases."""
    scratch: int
    """Beyond the payload and the new state, while a shard is coded and decoded again."""


def codec_memory(
    spec: CompressionSpec, layout: Layout, *, with_feedback: bool = True
) -> CodecMemory:
    """Measure the memory of the codec that the section names, for tensors of these shapes."""
    small = scaled_down(layout, _MAX_ELEMENTS)
    times = max(1.0, _numel(layout) / max(1, _numel(small)))
    codec = make_codec(spec, small, 0, with_feedback=with_feedback)
    draw = np.random.default_rng(0)
    values = [draw.standard_normal(tensor.numel, np.float32) for tensor in small]
    before = codec.initial_state()
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        payload, after = codec.encode(values, before, 1)
        decoded = codec.decode(payload, 1)
        peak = tracemalloc.get_traced_memory()[1] - start
    finally:
        if not was_tracing:
            tracemalloc.stop()
    del decoded
    state = sum(value.nbytes for value in after.values())
    return CodecMemory(
        payload=make_codec(spec, layout, 0, with_feedback=with_feedback).payload_bytes,
        state=round(times * state),
        scratch=round(times * max(0, peak - payload.nbytes - state)),
    )


def scaled_down(layout: Layout, max_elements: int) -> Sequence[TensorLayout]:
    """Tensors of the same number of dimensions and about the same shares of all elements."""
    total = _numel(layout)
    if total <= max_elements:
        return layout
    share = max_elements / total

    def shrunk(shape: tuple[int, ...]) -> tuple[int, ...]:
        factor = share ** (1 / max(1, len(shape)))
        return tuple(max(1, math.floor(size * factor)) if size else 0 for size in shape)

    return [TensorLayout(tensor.name, shrunk(tensor.shape)) for tensor in layout]


def _numel(layout: Layout) -> int:
    return sum(tensor.numel for tensor in layout)

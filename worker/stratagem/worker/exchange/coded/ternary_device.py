"""The codec `ternary` on a device: computes what `common.compression.quantize` does, with its bits.

The host computes thresholds and scales, from one sum per tensor that comes to it; so a payload
waits for the device two times, for any number of tensors, and once for the payload.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stratagem.common.compression import ByteArray, FloatArray, TensorLayout, derive
from stratagem.common.compression.codec import from_bytes
from stratagem.common.compression.quantize import mean, threshold_of
from stratagem.common.job import CompressionSpec
from stratagem.worker import kernels
from stratagem.worker.exchange.coded.device_coder import (
    FLOAT_BYTES,
    bytes_of,
    finite_totals,
    floats_of,
    on_host,
    put,
)


class TernaryForm:
    """The payload has the tensors in order, each as a scale and its codes, or as its values where
    that is no more bytes."""

    def __init__(
        self, spec: CompressionSpec, layout: Sequence[TensorLayout], bypassed: Sequence[str]
    ) -> None:
        self._spec, self._names = spec, [tensor.name for tensor in layout]
        self._numels = [tensor.numel for tensor in layout]
        as_it_is = set(bypassed)
        self._coded = [
            place
            for place, tensor in enumerate(layout)
            if tensor.numel and tensor.name not in as_it_is
        ]

    def encode(self, tensors: Sequence[Tensor], key: int, *, leaves_rest: bool) -> Tensor:
        totals = finite_totals(self._names, tensors)
        chosen = [tensors[place] for place in self._coded]
        if self._spec.stochastic:
            scales = largest(chosen)
            seeds = [derive(key, place) for place in self._coded]
            codes = [
                kernels.quantise_stochastic(x, float(scale), seed)
                for x, scale, seed in zip(chosen, scales, seeds, strict=True)
            ]
        else:
            scales, codes = quantised(
                chosen,
                [totals[place] for place in self._coded],
                self._spec.threshold_fraction,
                leaves_rest=leaves_rest,
            )
        parts = [[bytes_of(tensor)] for tensor in tensors]
        for place, part in zip(self._coded, with_scales(scales, codes), strict=True):
            parts[place] = part
        return torch.cat([tensor for part in parts for tensor in part])

    def decode(
        self, payload: Tensor, host: ByteArray, key: int, targets: Sequence[Tensor], *, adds: bool
    ) -> None:
        del key
        coded, start = set(self._coded), 0
        for place, target in enumerate(targets):
            numel = self._numels[place]
            size = coded_bytes(numel) if place in coded else FLOAT_BYTES * numel
            part, start = slice(start, start + size), start + size
            if place not in coded:
                put(target, floats_of(payload[part]), adds=adds)
            elif adds:
                kernels.unpack_add(target, *_codes_and_scale(payload[part], host[part]))
            else:
                target.copy_(unpacked(payload[part], host[part], numel))


def coded_bytes(numel: int) -> int:
    return FLOAT_BYTES + -(-numel // 4)


def quantised(
    tensors: Sequence[Tensor],
    totals: Sequence[float],
    threshold_fraction: float,
    *,
    leaves_rest: bool,
) -> tuple[FloatArray, list[Tensor]]:
    """Returns (scales, codes of each) of finite tensors whose magnitudes have these sums.
    leaves_rest: each tensor becomes what its codes do not carry. Waits for the device once."""
    thresholds = [
        float(threshold_of(threshold_fraction, total, x.numel()))
        for x, total in zip(tensors, totals, strict=True)
    ]
    kept = on_host(
        [
            kernels.sum_magnitudes(x, threshold=threshold)
            for x, threshold in zip(tensors, thresholds, strict=True)
        ]
    )
    scales = np.array([mean(float(total), int(num)) for total, num in kept], np.float32)
    codes = [
        kernels.quantise_deterministic(
            x, threshold, scale=float(scale), rest=x if leaves_rest else None
        )
        for x, threshold, scale in zip(tensors, thresholds, scales, strict=True)
    ]
    return scales, codes


def largest(tensors: Sequence[Tensor]) -> FloatArray:
    """Returns max |x| of each tensor, which has elements; never -0. Waits for the device once."""
    ends = on_host([torch.stack(torch.aminmax(x)) for x in tensors])
    return np.array([max(-low, high) + 0.0 for low, high in ends], np.float32)


def with_scales(scales: FloatArray, codes: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns [the scale's bytes, the codes] of each tensor."""
    if not codes:
        return []
    there = bytes_of(torch.from_numpy(scales).to(codes[0].device))
    return [[there[FLOAT_BYTES * i : FLOAT_BYTES * (i + 1)], code] for i, code in enumerate(codes)]


def unpacked(payload: Tensor, host: ByteArray, numel: int) -> Tensor:
    """Decodes the bytes of one tensor to float32 values."""
    codes, scale = _codes_and_scale(payload, host)
    return kernels.unpack(codes, numel, scale)


def _codes_and_scale(payload: Tensor, host: ByteArray) -> tuple[Tensor, float]:
    return payload[FLOAT_BYTES:], float(from_bytes(host[:FLOAT_BYTES], "<f4")[0])

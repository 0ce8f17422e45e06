"""`vsa` on a device: what `common.compression.vsa` does, with its bits.

A payload waits for the device once for the check, once or twice for the codec of the bundle, once
for the scales, and once for the payload. At most one tensor's guess is held at a time.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stratagem.common.compression import ByteArray, TensorLayout
from stratagem.common.compression.codec import from_bytes
from stratagem.common.compression.vsa import (
    BUNDLE,
    SKETCH_THRESHOLD_FRACTION,
    Vsa,
    key_seed,
    places_beside,
    scale_of,
)
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
from stratagem.worker.exchange.coded.ternary_device import largest, quantised, unpacked, with_scales

_INT8_LEVELS = np.float32(127.0)


class VsaForm:
    """The bundle by its own codec, a scale per tensor in it, then small tensors as they are."""

    def __init__(
        self, spec: CompressionSpec, layout: Sequence[TensorLayout], numerics: int
    ) -> None:
        beside = places_beside(layout, spec.dimension_fraction, numerics)
        self._beside = sorted(beside)
        self._others = [place for place in range(len(layout)) if place not in beside]
        bundled = [layout[place] for place in self._others]
        self._codec = Vsa(
            bundled, dimension_fraction=spec.dimension_fraction, sketch_codec=spec.sketch_codec
        )
        self._all_names = [tensor.name for tensor in layout]
        self._inner, self._names = spec.sketch_codec, [tensor.name for tensor in bundled]
        self._inner_bytes = self._codec.payload_bytes - FLOAT_BYTES * len(bundled)

    def encode(self, tensors: Sequence[Tensor], key: int, *, leaves_rest: bool) -> Tensor:
        finite_totals(self._all_names, tensors)
        others = [tensors[place] for place in self._others]
        coded = self._encode_bundled(others, key, leaves_rest=leaves_rest)
        return torch.cat([coded, *(bytes_of(tensors[place]) for place in self._beside)])

    def _encode_bundled(self, tensors: Sequence[Tensor], key: int, *, leaves_rest: bool) -> Tensor:
        if self._codec.is_bypassed:
            return torch.cat([bytes_of(tensor) for tensor in tensors])
        coded, vector = self._coded(self._bundle(tensors, key))
        products = [
            torch.stack([kernels.dot(guess, x), kernels.dot(guess, guess)])
            for place, x in enumerate(tensors)
            for guess in [self._guess(vector, place, key, 1.0)]
        ]
        scales = np.array([scale_of(float(a), float(b)) for a, b in on_host(products)], np.float32)
        if leaves_rest:
            for place, x in enumerate(tensors):
                x.sub_(self._guess(vector, place, key, float(scales[place])))
        return torch.cat([coded, bytes_of(torch.from_numpy(scales).to(coded.device))])

    def decode(
        self, payload: Tensor, host: ByteArray, key: int, targets: Sequence[Tensor], *, adds: bool
    ) -> None:
        size = self._codec.payload_bytes
        others = [targets[place] for place in self._others]
        self._decode_bundled(payload[:size], host[:size], key, others, adds=adds)
        for place in self._beside:
            start, size = size, size + FLOAT_BYTES * targets[place].numel()
            put(targets[place], floats_of(payload[start:size]), adds=adds)

    def _decode_bundled(
        self, payload: Tensor, host: ByteArray, key: int, targets: Sequence[Tensor], *, adds: bool
    ) -> None:
        if self._codec.is_bypassed:
            sizes = [FLOAT_BYTES * target.numel() for target in targets]
            for target, part in zip(targets, torch.split(payload, sizes), strict=True):
                put(target, floats_of(part), adds=adds)
            return
        vector = self._decoded(payload[: self._inner_bytes], host[: self._inner_bytes])
        scales = from_bytes(host[self._inner_bytes :], "<f4")
        for place, target in enumerate(targets):
            put(target, self._guess(vector, place, key, float(scales[place])), adds=adds)

    def _bundle(self, tensors: Sequence[Tensor], key: int) -> Tensor:
        total: Tensor | None = None
        for place in self._codec.order:
            seed = self._codec.sketch(place, key).seed
            bound = kernels.sketch(tensors[place], self._codec.dimension, seed)
            bound.mul_(self._key(place, bound.device))
            total = bound if total is None else total.add_(bound)
        assert total is not None
        return total

    def _guess(self, vector: Tensor, place: int, key: int, scale: float) -> Tensor:
        sketch = self._codec.sketch(place, key)
        return kernels.unsketch(
            vector * self._key(place, vector.device), sketch.numel, sketch.seed, scale
        )

    def _key(self, place: int, device: torch.device) -> Tensor:
        return kernels.signs(key_seed(self._names[place]), self._codec.dimension, device)

    def _coded(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (the bundle's bytes, the values that they decode to)."""
        totals = finite_totals([BUNDLE], [vector])
        match self._inner:
            case "int8":
                scale = largest([vector]) / _INT8_LEVELS
                levels = _int8(vector, float(scale[0]))
                [part] = with_scales(scale, [bytes_of(levels)])
                return torch.cat(part), levels.to(torch.float32) * float(scale[0])
            case "ternary":
                fraction = SKETCH_THRESHOLD_FRACTION
                scale, codes = quantised([vector], totals, fraction, leaves_rest=False)
                [part] = with_scales(scale, codes)
                said = kernels.unpack(codes[0], vector.numel(), float(scale[0]))
                return torch.cat(part), said
            case _:
                return bytes_of(vector), vector

    def _decoded(self, payload: Tensor, host: ByteArray) -> Tensor:
        match self._inner:
            case "int8":
                scale = float(from_bytes(host[:FLOAT_BYTES], "<f4")[0])
                return payload[FLOAT_BYTES:].view(torch.int8).to(torch.float32) * scale
            case "ternary":
                return unpacked(payload, host, self._codec.dimension)
            case _:
                return floats_of(payload)


def _int8(vector: Tensor, scale: float) -> Tensor:
    """Returns the levels of `common.compression.quantize`, rounded to the nearest, ties to even."""
    if scale == 0:
        return torch.zeros_like(vector, dtype=torch.int8)
    # Divided by a tensor: a number would be made its reciprocal, which rounds once more.
    divisor = torch.full((), scale, device=vector.device)
    return (vector / divisor).round_().clamp_(-127, 127).to(torch.int8)

"""Code gradients in place: with numpy on the host, or by a device form of the codec.

Both give the same bits, which `stratagem.common.compression` defines. `coder_of` is the only place
that knows which codecs have a device form. The module knows neither shards nor messages.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratagem.common.compression import (
    ByteArray,
    Codec,
    FloatArray,
    NonFiniteError,
    TensorLayout,
    derive,
)
from stratagem.common.compression.codec import RESIDUAL, from_bytes
from stratagem.common.compression.quantize import mean, threshold_of
from stratagem.common.compression.vsa import (
    BUNDLE,
    SKETCH_THRESHOLD_FRACTION,
    Vsa,
    key_seed,
    places_beside,
    scale_of,
)
from stratagem.common.job import CompressionSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker import kernels
from stratagem.worker.mesh.staging import to_host

# ---- Coders, and coding on the host ----

State = Mapping[str, Tensor]
"""A codec's state, on the device of the coder; its tensors are replaced, never changed."""


class Coder(Protocol):
    """Encodes and decodes the gradients of one model: float32, in the order of the layout."""

    def initial_state(self) -> State: ...

    def code(self, gradients: Sequence[Tensor], state: State, key: int) -> tuple[Tensor, State]:
        """Encode gradients; return (payload as uint8 on the CPU, the next state). The gradients are
        replaced by their decoded values. Raises NonFiniteError before anything is changed."""

    def decode(self, payload: Tensor, key: int, gradients: Sequence[Tensor], *, adds: bool) -> None:
        """Decode a payload (uint8, any device) into the gradients; adds: add to them instead."""


def coder_of(
    spec: CompressionSpec,
    layout: Sequence[TensorLayout],
    codec: Codec,
    device: torch.device,
    numerics: int = CURRENT,
) -> Coder:
    """Make the coder for this codec and device. codec: the numpy codec of this spec and layout."""
    if not kernels.runs_programs(device):
        return HostCoder(codec)
    match spec.codec:
        case "ternary":
            form = TernaryForm(spec, layout, codec.bypassed)
            return DeviceCoder(form, codec, layout, device)
        case "vsa":
            return DeviceCoder(VsaForm(spec, layout, numerics), codec, layout, device)
        case _:
            return HostCoder(codec)


class HostCoder:
    """A coder in numpy, which copies gradients of a device to the host, and decoded values back."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def initial_state(self) -> State:
        return {name: torch.from_numpy(x) for name, x in self._codec.initial_state().items()}

    def code(self, gradients: Sequence[Tensor], state: State, key: int) -> tuple[Tensor, State]:
        copies = [
            to_host(_flat(gradient)) for gradient in gradients
        ]  # all are started before one is read
        values = [copy.wait().numpy() for copy in copies]
        before = {name: tensor.numpy() for name, tensor in state.items()}
        encoded, after = self._codec.encode(values, before, key)
        payload = torch.from_numpy(encoded)
        self.decode(payload, key, gradients, adds=False)
        return payload, {name: torch.from_numpy(x) for name, x in after.items()}

    def decode(self, payload: Tensor, key: int, gradients: Sequence[Tensor], *, adds: bool) -> None:
        decoded = self._codec.decode(to_host(payload).wait().numpy(), key)
        for gradient, values in zip(gradients, decoded, strict=True):
            said = torch.from_numpy(values).view(gradient.shape)
            if adds:
                gradient.add_(said.to(gradient.device))
            else:
                gradient.copy_(said)


def _flat(gradient: Tensor) -> Tensor:
    return gradient.detach().reshape(-1).to(torch.float32)


# ---- Coding on a device ----
#
# Only payloads travel to the host. A *form* implements a codec on flat float32 vectors by the
# operators of `stratagem.worker.kernels`. `DeviceCoder` does what all forms share: residuals, the
# way to the host, and the check that values are finite.

FLOAT_BYTES: Final = 4


class Form(Protocol):
    def encode(self, tensors: Sequence[Tensor], key: int, *, leaves_rest: bool) -> Tensor:
        """Encode vectors, in order of the layout, as uint8 on the device. leaves_rest: each encoded
        vector is replaced by its residual; otherwise nothing changes. Raises NonFiniteError before
        anything is changed."""

    def decode(
        self, payload: Tensor, host: ByteArray, key: int, targets: Sequence[Tensor], *, adds: bool
    ) -> None:
        """Decode a payload into the vectors; adds: add to them instead. host: a copy of the payload
        on the CPU, for headers."""


class DeviceCoder:
    """A `Coder` whose state is on the device."""

    def __init__(
        self, form: Form, codec: Codec, layout: Sequence[TensorLayout], device: torch.device
    ) -> None:
        """Make the coder. form: the device form. codec: the numpy form, which defines the state."""
        self._form, self._device = form, device
        self._sizes = {name: x.size for name, x in codec.initial_state().items()}
        names = [f"{RESIDUAL}{spec.name}" for spec in layout]
        self._names = [name if name in self._sizes else "" for name in names]

    def initial_state(self) -> Mapping[str, Tensor]:
        return {name: torch.zeros(n, device=self._device) for name, n in self._sizes.items()}

    def code(
        self, gradients: Sequence[Tensor], state: Mapping[str, Tensor], key: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        flats = _flats(gradients)
        wanted = [
            flat + state[name] if name else flat
            for name, flat in zip(self._names, flats, strict=True)
        ]
        payload = self._form.encode(wanted, key, leaves_rest=bool(self._sizes))
        host = to_host(payload).wait()
        self._form.decode(payload, host.numpy(), key, flats, adds=False)
        residuals = zip(self._names, wanted, strict=True)
        return host, {name: rest for name, rest in residuals if name}

    def decode(self, payload: Tensor, key: int, gradients: Sequence[Tensor], *, adds: bool) -> None:
        there = payload.to(self._device, non_blocking=True)
        host = to_host(payload).wait().numpy()
        self._form.decode(there, host, key, _flats(gradients), adds=adds)


def finite_totals(names: Sequence[str], tensors: Sequence[Tensor]) -> list[float]:
    """Return each tensor's sum of magnitudes. Raises NonFiniteError. Waits for the device once."""
    totals = on_host([kernels.sum_magnitudes(tensor)[0] for tensor in tensors])
    for name, total in zip(names, totals, strict=True):
        if not np.isfinite(total):
            raise NonFiniteError(name)
    return [float(total) for total in totals]


def on_host(values: Sequence[Tensor]) -> NDArray[Any]:
    """Return small tensors of one shape as one numpy array (n, ...)."""
    if not values:
        return np.empty(0)
    array: NDArray[Any] = to_host(torch.stack(list(values))).wait().numpy()
    return array


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a vector as uint8, without a copy."""
    return tensor.view(torch.uint8)


def floats_of(payload: Tensor) -> Tensor:
    """Return bytes, which may be unaligned, as a float32 copy."""
    return payload.clone().view(torch.float32)


def put(target: Tensor, values: Tensor, *, adds: bool) -> None:
    if adds:
        target.add_(values)
    else:
        target.copy_(values)


def _flats(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return flat views of contiguous float32 gradients."""
    return [gradient.detach().view(-1) for gradient in gradients]


# ---- Ternary form ----
#
# It computes the bits of `common.compression.quantize`. The host computes thresholds and scales
# from one sum per tensor; so a payload waits for the device two times, for any number of tensors,
# and once for the payload.


class TernaryForm:
    """Device form of the ternary codec: each tensor as a scale and 2-bit codes, or uncoded if that
    is smaller."""

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
                kernels.quantise_stochastic(tensor, float(scale), seed)
                for tensor, scale, seed in zip(chosen, scales, seeds, strict=True)
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
    """Return (scales, codes) of finite tensors with these sums of magnitudes. leaves_rest: each
    tensor is replaced by its residual. Waits for the device once."""
    thresholds = [
        float(threshold_of(threshold_fraction, total, tensor.numel()))
        for tensor, total in zip(tensors, totals, strict=True)
    ]
    sums = on_host(
        [
            kernels.sum_magnitudes(tensor, threshold=threshold)
            for tensor, threshold in zip(tensors, thresholds, strict=True)
        ]
    )
    scales = np.array([mean(float(total), int(num)) for total, num in sums], np.float32)
    codes = [
        kernels.quantise_deterministic(
            tensor, threshold, scale=float(scale), rest=tensor if leaves_rest else None
        )
        for tensor, threshold, scale in zip(tensors, thresholds, scales, strict=True)
    ]
    return scales, codes


def largest(tensors: Sequence[Tensor]) -> FloatArray:
    """Return max |x| of each non-empty tensor, never as -0. Waits for the device once."""
    ends = on_host([torch.stack(torch.aminmax(x)) for x in tensors])
    return np.array([max(-low, high) + 0.0 for low, high in ends], np.float32)


def with_scales(scales: FloatArray, codes: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return each tensor's scale, as bytes, followed by its codes."""
    if not codes:
        return []
    there = bytes_of(torch.from_numpy(scales).to(codes[0].device))
    return [[there[FLOAT_BYTES * i : FLOAT_BYTES * (i + 1)], code] for i, code in enumerate(codes)]


def unpacked(payload: Tensor, host: ByteArray, numel: int) -> Tensor:
    """Decode one ternary tensor from its bytes to float32 values."""
    codes, scale = _codes_and_scale(payload, host)
    return kernels.unpack(codes, numel, scale)


def _codes_and_scale(payload: Tensor, host: ByteArray) -> tuple[Tensor, float]:
    return payload[FLOAT_BYTES:], float(from_bytes(host[:FLOAT_BYTES], "<f4")[0])


# ---- VSA form ----
#
# It computes the bits of `common.compression.vsa`. A payload waits for the device once for the
# check, once or twice for the codec of the bundle, once for the scales, and once for the payload.
# At most one tensor's guess is held at a time.

_INT8_LEVELS = np.float32(127.0)


class VsaForm:
    """Device form of the vsa codec: one bundle for all large tensors with their scales, then the
    small tensors uncoded."""

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
        """Return (the bundle as bytes, the values that they decode to)."""
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
    """Return the levels of `common.compression.quantize`, rounded to the nearest, ties to even."""
    if scale == 0:
        return torch.zeros_like(vector, dtype=torch.int8)
    # The divisor is a tensor, since torch multiplies by the rounded reciprocal of a number.
    divisor = torch.full((), scale, device=vector.device)
    return (vector / divisor).round_().clamp_(-127, 127).to(torch.int8)

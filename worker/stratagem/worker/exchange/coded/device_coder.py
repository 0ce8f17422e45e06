"""Coding of gradients on the device that holds them; only payloads travel to the host.

A *form* is what a codec does there to flat float32 vectors, by the operators of
`stratagem.worker.kernels`; this is what all forms share: residuals, the way to the host, and the
check that values are finite.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratagem.common.compression import ByteArray, Codec, NonFiniteError, TensorLayout
from stratagem.common.compression.codec import RESIDUAL
from stratagem.worker import kernels
from stratagem.worker.mesh.device_staging import to_host

FLOAT_BYTES: Final = 4


class Form(Protocol):
    def encode(self, tensors: Sequence[Tensor], key: int, *, leaves_rest: bool) -> Tensor:
        """Returns the payload (uint8, on the device) of vectors in order of the layout.
        leaves_rest: what it did not carry takes the place of each tensor that is not sent as it is;
        else nothing changes. Raises NonFiniteError, and has changed nothing then."""

    def decode(
        self, payload: Tensor, host: ByteArray, key: int, targets: Sequence[Tensor], *, adds: bool
    ) -> None:
        """Leaves in the vectors what a payload says, or adds it. host: the payload's bytes again,
        for the few that the host must read."""


class DeviceCoder:
    """A `Coder` whose state is on the device."""

    def __init__(
        self, form: Form, codec: Codec, layout: Sequence[TensorLayout], device: torch.device
    ) -> None:
        """codec: in numpy; says what is kept."""
        self._form, self._device = form, device
        self._kept = {name: x.size for name, x in codec.initial_state().items()}
        names = [f"{RESIDUAL}{spec.name}" for spec in layout]
        self._names = [name if name in self._kept else "" for name in names]

    def initial_state(self) -> Mapping[str, Tensor]:
        return {name: torch.zeros(n, device=self._device) for name, n in self._kept.items()}

    def code(
        self, gradients: Sequence[Tensor], state: Mapping[str, Tensor], key: int
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        flats = _flats(gradients)
        wanted = [
            flat + state[name] if name else flat
            for name, flat in zip(self._names, flats, strict=True)
        ]
        payload = self._form.encode(wanted, key, leaves_rest=bool(self._kept))
        host = to_host(payload).wait()
        self._form.decode(payload, host.numpy(), key, flats, adds=False)
        kept = zip(self._names, wanted, strict=True)
        return host, {name: rest for name, rest in kept if name}

    def decode(self, payload: Tensor, key: int, gradients: Sequence[Tensor], *, adds: bool) -> None:
        there = payload.to(self._device, non_blocking=True)
        host = to_host(payload).wait().numpy()
        self._form.decode(there, host, key, _flats(gradients), adds=adds)


def finite_totals(names: Sequence[str], tensors: Sequence[Tensor]) -> list[float]:
    """Returns the sum of the magnitudes of each; raises NonFiniteError. Waits for the device
    once."""
    totals = on_host([kernels.sum_magnitudes(tensor)[0] for tensor in tensors])
    for name, total in zip(names, totals, strict=True):
        if not np.isfinite(total):
            raise NonFiniteError(name)
    return [float(total) for total in totals]


def on_host(values: Sequence[Tensor]) -> NDArray[Any]:
    """Returns small tensors of one shape as one array (n, ...)."""
    if not values:
        return np.empty(0)
    array: NDArray[Any] = to_host(torch.stack(list(values))).wait().numpy()
    return array


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a vector, on a device of little endian."""
    return tensor.view(torch.uint8)


def floats_of(payload: Tensor) -> Tensor:
    """Returns a copy of bytes, which may begin at any address, as float32."""
    return payload.clone().view(torch.float32)


def put(target: Tensor, values: Tensor, *, adds: bool) -> None:
    if adds:
        target.add_(values)
    else:
        target.copy_(values)


def _flats(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns flat views of contiguous float32 gradients."""
    return [gradient.detach().view(-1) for gradient in gradients]

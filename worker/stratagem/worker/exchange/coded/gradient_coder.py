"""Coders that code gradients in place: numpy on the host, or a device form of the codec.

Both give the same bits; those of `stratagem.common.compression` are the definition. `coder_of` is
the only place that knows which codecs have a device form. Knows neither shards nor messages.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from stratagem.common.compression import Codec, TensorLayout
from stratagem.common.job import CompressionSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker import kernels
from stratagem.worker.exchange.coded.device_coder import DeviceCoder
from stratagem.worker.exchange.coded.ternary_device import TernaryForm
from stratagem.worker.exchange.coded.vsa_device import VsaForm
from stratagem.worker.mesh.device_staging import to_host

State = Mapping[str, Tensor]
"""A codec's state, where the coder works; its tensors are replaced, never changed."""


class Coder(Protocol):
    """Codes and decodes the gradients of one model, float32, in the order of the layout."""

    def initial_state(self) -> State: ...

    def code(self, gradients: Sequence[Tensor], state: State, key: int) -> tuple[Tensor, State]:
        """Returns (the payload, uint8 on the CPU; the state after it), and leaves in the gradients
        what the payload decodes to. Raises NonFiniteError, and has changed nothing then."""

    def decode(self, payload: Tensor, key: int, gradients: Sequence[Tensor], *, adds: bool) -> None:
        """Leaves in the gradients what a payload decodes to, or adds it. payload: uint8, on any
        device."""


def coder_of(
    spec: CompressionSpec,
    layout: Sequence[TensorLayout],
    codec: Codec,
    device: torch.device,
    numerics: int = CURRENT,
) -> Coder:
    """Returns the coder for this codec and device. codec: of this section and layout, in numpy.
    device: of the gradients."""
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
    """Codes in numpy: copies gradients to the host, if they are not there, and what is decoded
    back."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def initial_state(self) -> State:
        return {name: torch.from_numpy(x) for name, x in self._codec.initial_state().items()}

    def code(self, gradients: Sequence[Tensor], state: State, key: int) -> tuple[Tensor, State]:
        copies = [
            to_host(_flat(gradient)) for gradient in gradients
        ]  # all under way before one is read
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

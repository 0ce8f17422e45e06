"""Error feedback: what a payload did not carry is added to the next one.

r' = (x + r) - decoded, per tensor, in float32. Over any number of payloads the sum of what was
decoded is the sum of the inputs minus the last residual, for any codec
(https://arxiv.org/abs/1901.09847).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from stratagem.common.compression.codec import (
    ByteArray,
    Codec,
    Decode,
    FloatArray,
    Layout,
    Read,
    State,
)

RESIDUAL: Final = "residual/"


class ErrorFeedback:
    """A codec around another one, with a residual for each tensor that loses anything."""

    def __init__(self, layout: Layout, codec: Codec) -> None:
        self._codec, self._layout = codec, layout
        lossless = set(codec.bypassed)
        self._names = [
            f"{RESIDUAL}{spec.name}" if spec.name not in lossless and spec.numel else ""
            for spec in layout
        ]
        self.payload_bytes, self.bypassed = codec.payload_bytes, codec.bypassed

    def initial_state(self) -> State:
        residuals = {
            name: np.zeros(spec.numel, np.float32)
            for name, spec in zip(self._names, self._layout, strict=True)
            if name
        }
        return {**self._codec.initial_state(), **residuals}

    def encode(
        self, tensors: Sequence[FloatArray], state: State, key: int
    ) -> tuple[ByteArray, State]:
        wanted = [
            tensor + state[name] if name else tensor
            for name, tensor in zip(self._names, tensors, strict=True)
        ]
        inner = {name: value for name, value in state.items() if name not in self._names}
        payload, kept = self._codec.encode(wanted, inner, key)
        decoded = self._codec.decode(payload, key)
        residuals = {
            name: x - y for name, x, y in zip(self._names, wanted, decoded, strict=True) if name
        }
        return payload, {**kept, **residuals}

    def decode(self, payload: ByteArray, key: int) -> list[FloatArray]:
        return self._codec.decode(payload, key)

    def part(self, places: range) -> "ErrorFeedback | None":
        inner = self._codec.part(places)
        if inner is None:
            return None
        return ErrorFeedback(self._layout[places.start : places.stop], inner)

    def decoder(self, place: int, read: Read) -> Decode | None:
        return self._codec.decoder(place, read)

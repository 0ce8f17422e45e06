"""The codec of a session's gradients: what becomes of a logical shard before anybody adds it up.

The unit is the shard. Whoever owns it codes its gradient, and everybody, the owner too, adds what
decoding gives. So sums have the same bits whoever owns which shards and whatever carries them, as a
message or not at all. What the codec keeps (residuals) belongs to the shard and changes only when
the step has been applied. Used by the torch thread and the thread of an exchange in turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.compression import NonFiniteError, TensorLayout, derive, make_codec
from stratagem.common.errors import InvalidInputError, UserCodeError
from stratagem.common.job import CompressionSpec, JobSpec
from stratagem.worker.exchange.coder import State, coder_of
from stratagem.worker.mesh.staging import to_host

_STATE_NAME: Final = re.compile(r"(residual|basis)/shard(\d+)/(.+)", re.DOTALL)


@dataclass(slots=True)
class Traffic:
    """Bytes that this member has sent, over some steps."""

    sent_bytes: int = 0
    uncompressed_bytes: int = 0
    """What the same steps would have sent as float32."""


class Compressor:
    """Codes and decodes shards of one model. A *message* is a payload and the shard's extras."""

    def __init__(
        self,
        spec: CompressionSpec,
        params: Sequence[tuple[str, nn.Parameter]],
        *,
        num_extras: int,
        seed: int,
        may_skip: bool = False,
    ) -> None:
        """may_skip: gradients that are not finite do not end the run but spoil their step."""
        wide = [name for name, param in params if param.dtype == torch.float64]
        if wide:
            text = f"{spec.codec} codes float32; these parameters are float64: {', '.join(wide)}"
            raise InvalidInputError.at("compression.codec", text)
        self.name, self.keeps_state = spec.codec, spec.keeps_state
        self.traffic = Traffic()
        self.layout = layout = tuple(
            TensorLayout(name, tuple(param.shape)) for name, param in params
        )
        self._codec = make_codec(spec, layout, seed)
        device = params[0][1].device if params else torch.device("cpu")
        self._coder = coder_of(spec, layout, self._codec, device)
        self._may_skip = may_skip
        self._seed = seed if spec.seed is None else spec.seed
        self.raw_bytes = sum(each.raw_bytes for each in layout) + 8 * num_extras
        self.message_bytes = self._codec.payload_bytes + 8 * num_extras
        self.bypassed = self._codec.bypassed
        self._owned: range | None = None
        self._states: dict[int, State] = {}
        self._coded: dict[int, State] = {}  # of the step under way
        self.messages: dict[int, Tensor] = {}
        """Of the step under way, by own shard: uint8 on the CPU."""
        self._step = 0

    def begin_step(self, step: int, owned: range) -> None:
        """Forgets a step that was not applied. `owned` may change only after `load_state`."""
        self._step = step
        self._coded, self.messages = {}, {}
        if self.keeps_state and owned != self._owned:
            self._own(owned)

    def code(self, shard: int, gradients: Sequence[Tensor], extras: Tensor) -> None:
        """Makes the shard's message and leaves in the gradients what it says. Where they are not
        finite, raises UserCodeError, or makes the extras NaN, by which all members know."""
        before = self._states[shard] if self.keeps_state else {}
        try:
            payload, after = self._coder.code(gradients, before, self._key(shard))
        except NonFiniteError as error:
            if self._may_skip:
                for each in gradients:
                    each.zero_()
                self.code(shard, gradients, extras.fill_(torch.nan))
                return
            raise UserCodeError(
                "FloatingPointError",
                f"non-finite gradient of {error.name} at step {self._step}",
                activity=f"training step {self._step}",
            ) from None
        self._coded[shard] = after
        self.messages[shard] = torch.cat([payload, extras.view(torch.uint8)])

    def decode(
        self, shard: int, message: Tensor, gradients: Sequence[Tensor], *, adds: bool = False
    ) -> Tensor:
        """What another member's message says: the gradients, which it leaves there, or adds; and
        its extras (float64, on the CPU), which it returns."""
        payload = message[: self._codec.payload_bytes]
        extras = to_host(message[self._codec.payload_bytes :])
        self._coder.decode(payload, self._key(shard), gradients, adds=adds)
        return extras.wait().clone().view(torch.float64)

    def applied(self) -> None:
        """The step has been applied: its residuals count from now on."""
        if self.keeps_state:
            self._states.update(self._coded)
        self._coded = {}

    def count(self, sent_bytes: int, uncompressed_bytes: int) -> None:
        self.traffic.sent_bytes += sent_bytes
        self.traffic.uncompressed_bytes += uncompressed_bytes

    def take_traffic(self) -> Traffic:
        """What was sent since this was last asked."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def state(self) -> dict[str, Tensor]:
        """`residual/shard<k>/<parameter>` and the like, of the own shards; none before a step."""
        return {
            _full_name(shard, name): values
            for shard, state in sorted(self._states.items())
            for name, values in state.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up what a state holds of any shards; other tensors are left alone."""
        found: dict[int, dict[str, Tensor]] = {}
        initial = self._coder.initial_state()
        for full, tensor in tensors.items():
            parsed = _STATE_NAME.fullmatch(full)
            if parsed is None:
                continue
            kind, shard, name = parsed.groups()
            expected = initial.get(f"{kind}/{name}")
            if expected is None or tensor.shape != expected.shape:
                raise InvalidInputError.at(f"state.{full}", "does not belong to this codec")
            values = tensor.to(expected.device, torch.float32, copy=True)
            found.setdefault(int(shard), {})[f"{kind}/{name}"] = values
        for shard, given in found.items():
            if given.keys() != initial.keys():
                raise InvalidInputError.at(f"state.residual/shard{shard}", "is incomplete")
        self._owned, self._states = None, dict(found)

    def _own(self, owned: range) -> None:
        if self._owned is not None:
            raise RuntimeError(f"the residuals here are of shards {self._owned}, not {owned}")
        missing = [shard for shard in owned if shard not in self._states]
        if self._states and missing:
            raise InvalidInputError.at("state", f"has no residuals of shards {missing}")
        self._owned = owned
        self._states = {
            shard: self._states.get(shard) or self._coder.initial_state() for shard in owned
        }

    def _key(self, shard: int) -> int:
        return derive(self._seed, self._step, shard)


def compressor_of(
    job: JobSpec, params: Sequence[tuple[str, nn.Parameter]], num_extras: int
) -> Compressor | None:
    """The one that the job wants, if it wants one."""
    spec = job.compression
    if spec is None or spec.codec == "none":
        return None
    return Compressor(
        spec, params, num_extras=num_extras, seed=job.seed, may_skip=job.window.may_skip
    )


def _full_name(shard: int, name: str) -> str:
    kind, _, param = name.partition("/")
    return f"{kind}/shard{shard}/{param}"

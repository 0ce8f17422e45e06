"""Compress a session's gradients: each logical shard is coded before it is added to others.

The member that owns a shard codes its gradient, and every member, the owner too, adds the decoded
values. So sums have the same bits whichever member owns a shard and by any transport. The residuals
of the codec belong to the shard and change only when the step has been applied. The torch thread
codes portions of a shard while the thread of an exchange sends and decodes earlier ones. The coded
value is the shard's mean gradient, and its weight is sent with it; see common.compression.table.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.compression import Codec, NonFiniteError, TensorLayout, derive, make_codec
from stratagem.common.compression.codec import RESIDUAL
from stratagem.common.compression.table import unit
from stratagem.common.job import CompressionSpec, JobSpec, exchanged_codec
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.exchange.coders import Coder, HostCoder, State, coder_of
from stratagem.worker.exchange.layout import BucketLayout
from stratagem.worker.exchange.transports import FIRST_REACHED
from stratagem.worker.mesh.staging import to_host

# ---- Portions of a shard ----
#
# A codec that codes each tensor by itself can begin while backward is still busy with the others,
# so a portion is the tensors of one bucket. Where tensors share a payload, and on a device, where
# coding in the middle of backward would cause waits, a single portion has all tensors. Either way
# the bits are the same.


@dataclass(frozen=True, slots=True)
class Portion:
    """A group of tensors that are encoded together, as soon as all of their buckets are full."""

    index: int
    buckets: range
    """The buckets of the portion. The last portion also has the bucket of the extras, which are not
    encoded."""
    places: range
    """The indices of its tensors among the parameters."""
    num_bytes: int
    """Size of the portion's payload."""
    state_names: tuple[str, ...]
    coder: Coder
    has_extras: bool


def plan_portions(
    layout: BucketLayout, codec: Codec, coder: Coder, device: torch.device
) -> list[Portion]:
    """Return the portions in order of their buckets, over all buckets of the layout. coder: the
    coder of all tensors, for gradients on `device`."""
    buckets = range(len(layout.buckets))
    held = [_places(layout, bucket) for bucket in buckets[:-1]]
    is_here = device.type == "cpu" and isinstance(coder, HostCoder)
    parts = [codec.part(places) for places in held] if is_here else []
    if len(parts) < 2 or any(part is None for part in parts):
        names = tuple(codec.initial_state())
        places = range(len(layout.slots))
        return [Portion(0, buckets, places, codec.payload_bytes, names, coder, True)]
    portions = []
    for index, (places, part) in enumerate(zip(held, parts, strict=True)):
        assert part is not None
        is_last = index == len(parts) - 1
        own_buckets = buckets[index:] if is_last else buckets[index : index + 1]
        names = tuple(part.initial_state())
        size, coder = part.payload_bytes, HostCoder(part)
        portions.append(Portion(index, own_buckets, places, size, names, coder, is_last))
    return portions


def _places(layout: BucketLayout, bucket: int) -> range:
    """Return the indices of a bucket's parameters, which are consecutive."""
    held: Sequence[int] = [slot.index for slot in layout.slots if slot.bucket == bucket]
    return range(min(held), max(held) + 1)


# ---- Gradient compressor ----

_STATE_NAME: Final = re.compile(r"(residual|basis)/shard(\d+)/(.+)", re.DOTALL)


@dataclass(slots=True)
class Traffic:
    """Number of bytes that this member has sent over some steps."""

    sent_bytes: int = 0
    uncompressed_bytes: int = 0
    """Number of bytes that these steps would have sent uncompressed, as float32."""


@dataclass(slots=True)
class _Coded:
    """The payloads, state and extras of one shard in the present step."""

    payloads: dict[int, Tensor]
    """The payloads by portion: uint8 on the CPU. The last portion has the first parameters."""
    state: dict[str, Tensor]
    extras: Tensor | None = None
    is_spoiled: bool = False
    """True if a gradient was not finite."""


class Compressor:
    """Encodes and decodes the shards of one model, with residuals per shard.

    A *message* is a payload and the shard's extras; a *piece* is a portion's part of a message, the
    last one with the extras.
    """

    def __init__(
        self,
        spec: CompressionSpec,
        params: Sequence[tuple[str, nn.Parameter]],
        *,
        num_extras: int,
        seed: int,
        may_skip: bool = False,
        numerics: int = CURRENT,
    ) -> None:
        """Begin without residuals. may_skip: gradients that are not finite spoil their step instead
        of ending the run; see `StepScalars.reached`."""
        self.name, self.keeps_state = spec.codec, spec.keeps_state
        self.traffic = Traffic()
        self.layout = layout = tuple(
            TensorLayout(name, tuple(param.shape)) for name, param in params
        )
        self._codec = make_codec(spec, layout, seed, numerics=numerics)
        self._device = params[0][1].device if params else torch.device("cpu")
        self._coder = coder_of(spec, layout, self._codec, self._device, numerics)
        self._portions: dict[str, list[Portion]] = {}
        self._may_skip, self._numerics = may_skip, numerics
        self._seed = seed if spec.seed is None else spec.seed
        self._num_extras = num_extras
        self.raw_bytes = sum(tensor.raw_bytes for tensor in layout) + 8 * num_extras
        self.message_bytes = self._codec.payload_bytes + 8 * num_extras
        self.bypassed = self._codec.bypassed
        self._owned: range | None = None
        self._states: dict[int, State] = {}
        self._coded: dict[int, _Coded] = {}  # of the present step
        self._units: dict[int, float] = {}  # of own shards
        self._step = 0

    def portions(self, layout: BucketLayout) -> list[Portion]:
        """Return the portions for gradients in buckets of this layout."""
        if layout.digest not in self._portions:
            portions = plan_portions(layout, self._codec, self._coder, self._device)
            self._portions[layout.digest] = portions
        return self._portions[layout.digest]

    def begin_step(self, step: int, owned: range) -> None:
        """Begin a step, dropping one not applied. `owned` may change only after `load_state`."""
        self._step, self._coded, self._units = step, {}, {}
        if self.keeps_state and owned != self._owned:
            self._assign(owned)

    def weigh(self, shard: int, weight: float) -> None:
        """Set the weight of a shard of this member, the first extra; required before `code`."""
        self._units[shard] = unit(weight, self._numerics)

    def code(self, shard: int, portion: Portion, gradients: Sequence[Tensor]) -> None:
        """Encode a portion of the shard, and replace its gradients by their decoded values. If one
        is not finite, raise UserCodeError, or zero the gradients and spoil the shard."""
        if shard not in self._units:
            raise RuntimeError(
                "gradients came before the forward pass had ended: a micro-batch is one backward"
            )
        coded = self._coded.setdefault(shard, _Coded({}, {}))
        before = self._states[shard] if self.keeps_state else {}
        residuals = {name: before[name] for name in portion.state_names} if before else {}
        chosen = gradients[portion.places.start : portion.places.stop]
        divisor = self._units[shard]
        try:
            if divisor != 1.0:
                torch._foreach_div_(list(chosen), divisor)
            payload, after = portion.coder.code(chosen, residuals, self._key(shard))
            if divisor != 1.0:
                torch._foreach_mul_(list(chosen), divisor)
        except NonFiniteError as error:
            if not self._may_skip:
                raise self._not_finite(error) from None
            coded.is_spoiled = True
            for gradient in chosen:
                gradient.zero_()
            self.code(shard, portion, gradients)
            return
        coded.payloads[portion.index] = payload
        coded.state.update(after)

    def end(self, shard: int, extras: Tensor) -> None:
        """Complete the message of a shard. Gradients that were not finite are flagged in the
        extras, so that all members know."""
        if self._coded[shard].is_spoiled:
            extras[FIRST_REACHED] = torch.nan
        self._coded[shard].extras = extras.clone()

    def piece(self, shard: int, portion: Portion) -> Tensor:
        """Return a portion's piece of a shard of this member, to be sent: uint8 on the CPU."""
        coded = self._coded[shard]
        payload = coded.payloads[portion.index]
        if not portion.has_extras:
            return self._with_weight(payload, torch.tensor([self._units[shard]]).double())
        assert coded.extras is not None
        return torch.cat([payload, coded.extras.view(torch.uint8)])

    def piece_bytes(self, portion: Portion) -> int:
        beside = self._num_extras if portion.has_extras else int(self._numerics >= 2)
        return portion.num_bytes + 8 * beside

    def _with_weight(self, payload: Tensor, weight: Tensor) -> Tensor:
        """Return a payload with the weight before it, which decoding needs before the extras
        arrive. weight: float64 (1,)."""
        return payload if self._numerics < 2 else torch.cat([payload, weight.view(torch.uint8)])

    def message(self, shard: int) -> Tensor:
        """Return the whole message of a shard of this member: uint8 on the CPU."""
        coded = self._coded[shard]
        assert coded.extras is not None
        payloads = [coded.payloads[index] for index in sorted(coded.payloads, reverse=True)]
        return torch.cat([*payloads, coded.extras.view(torch.uint8)])

    def cut(self, message: Tensor, portions: Sequence[Portion]) -> list[Tensor]:
        """Cut a whole message into its pieces, by portion."""
        sizes = [portion.num_bytes for portion in reversed(portions)]
        *payloads, extras = torch.split(message, [*sizes, 8 * self._num_extras])
        last, *others = payloads
        weight = extras[:8].clone().view(torch.float64)
        beside = [self._with_weight(other, weight) for other in reversed(others)]
        return [*beside, torch.cat([last, extras])]

    def decode(
        self,
        shard: int,
        portion: Portion,
        piece: Tensor,
        gradients: Sequence[Tensor],
        *,
        adds: bool = False,
    ) -> Tensor:
        """Decode another member's piece into `gradients`; adds: add to them instead. Return the
        extras of the last piece (float64, on the CPU), else nothing."""
        extras = to_host(piece[portion.num_bytes :]).wait().clone().view(torch.float64)
        payload, key = piece[: portion.num_bytes], self._key(shard)
        its = unit(float(extras[0]), self._numerics) if extras.numel() else 1.0
        if its == 1.0:
            portion.coder.decode(payload, key, gradients, adds=adds)
        else:
            said = [torch.empty_like(gradient) for gradient in gradients] if adds else gradients
            portion.coder.decode(payload, key, said, adds=False)
            torch._foreach_mul_(list(said), its)
            if adds:
                torch._foreach_add_(list(gradients), list(said))
        return extras if portion.has_extras else extras[:0]

    def applied(self) -> None:
        """Keep the step's new residuals; called once the step has been applied."""
        if self.keeps_state:
            self._states.update({shard: encoded.state for shard, encoded in self._coded.items()})
        self._coded = {}

    def rescale(self, factor: float) -> None:
        """Scale the residuals, since gradients are scaled by this factor from now on. factor: a
        power of two. Other parts of the state do not depend on the scale."""
        self._states = {
            shard: {
                name: values * factor if name.startswith(RESIDUAL) else values
                for name, values in state.items()
            }
            for shard, state in self._states.items()
        }

    def count(self, sent_bytes: int, uncompressed_bytes: int) -> None:
        self.traffic.sent_bytes += sent_bytes
        self.traffic.uncompressed_bytes += uncompressed_bytes

    def take_traffic(self) -> Traffic:
        """Return the bytes sent since the last call."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic

    def state(self) -> dict[str, Tensor]:
        """Return the residuals of this member's shards, as `residual/shard<k>/<parameter>`; empty
        before the first step."""
        return {
            _full_name(shard, name): values
            for shard, state in sorted(self._states.items())
            for name, values in state.items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the residuals of any shards from a state; ignore other tensors."""
        by_shard: dict[int, dict[str, Tensor]] = {}
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
            by_shard.setdefault(int(shard), {})[f"{kind}/{name}"] = values
        for shard, given in by_shard.items():
            if given.keys() != initial.keys():
                raise InvalidInputError.at(f"state.residual/shard{shard}", "is incomplete")
        self._owned, self._states = None, dict(by_shard)

    def _assign(self, owned: range) -> None:
        if self._owned is not None:
            raise RuntimeError(f"the residuals here are of shards {self._owned}, not {owned}")
        missing = [shard for shard in owned if shard not in self._states]
        if self._states and missing:
            raise InvalidInputError.at("state", f"has no residuals of shards {missing}")
        self._owned = owned
        self._states = {
            shard: self._states.get(shard) or self._coder.initial_state() for shard in owned
        }

    def _not_finite(self, error: NonFiniteError) -> UserCodeError:
        return UserCodeError(
            "FloatingPointError",
            f"non-finite gradient of {error.name} at step {self._step}",
            activity=f"training step {self._step}",
        )

    def _key(self, shard: int) -> int:
        return derive(self._seed, self._step, shard)


def compressor_of(
    job: JobSpec,
    params: Sequence[tuple[str, nn.Parameter]],
    num_extras: int,
    *,
    absorbs: bool,
    numerics: int,
) -> Compressor | None:
    """Make the compressor of the job; None if it has no codec. absorbs: the loss is scaled, and
    steps with non-finite gradients are repeated with a smaller scale."""
    spec = exchanged_codec(job.compression, job.strategy)
    if spec is None:
        return None
    may_skip = job.window.may_skip or absorbs
    return Compressor(
        spec,
        params,
        num_extras=num_extras,
        seed=job.seed,
        may_skip=may_skip,
        numerics=numerics,
    )


def _full_name(shard: int, name: str) -> str:
    kind, _, param = name.partition("/")
    return f"{kind}/shard{shard}/{param}"

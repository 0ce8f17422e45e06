"""Compute in 16 bits by autocast, 16-bit copies of the weights, and a scale of the loss.

Parameters and optimizer stay float32 in both cases, so that small updates are not lost and sums
over shards, clients and neighbours are taken in float32. Mixed precision follows Micikevicius et
al., "Mixed Precision Training" (arXiv:1710.03740).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import ExecutionSpec
from stratagem.worker.models.tensors import name_of
from stratagem.worker.numerics.randomness import device_name

# ---- Mixed precision ----

Forward = Callable[..., Any]

_FIRST_SCALE: Final = 2.0**16
_LARGEST_SCALE: Final = 2.0**24
_SMALLEST_SCALE: Final = 2.0**-14
_GROWTH_INTERVAL_STEPS: Final = 2000


def low_dtype(spec: ExecutionSpec) -> torch.dtype | None:
    """Return the 16-bit dtype of Mixed and Half; None for other settings."""
    if spec.precision not in ("Mixed", "Half"):
        return None
    return torch.float16 if spec.amp_dtype == "float16" else torch.bfloat16


def autocasting(forward: Forward, device: torch.device, dtype: torch.dtype) -> Forward:
    """Return the forward pass with matrix products in `dtype`, as torch.autocast chooses them.

    Weights are cast at each use. A cache of casts would add the gradients of several uses in 16
    bits, and would be gone when checkpointed activations are computed again.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            return forward(*args, **kwargs)

    return run


def lowered(forward: Forward, module: nn.Module, dtype: torch.dtype) -> Forward:
    """Return the forward pass with parameters, buffers and inputs as `dtype`.

    Batch and instance norm keep their dtype, as running statistics need more bits. Gradients reach
    the float32 parameters through the casts. Changes of buffers are copied back.
    """
    holders = [
        submodule
        for submodule in module.modules()
        if not isinstance(submodule, nn.modules.batchnorm._NormBase)
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), dtype)
        with _cast_state(holders, dtype):
            return forward(*args, **kwargs)

    return run


def single(value: Any) -> Any:
    """Convert 16-bit floats in nested tensors to float32, which losses and metrics need."""

    def widen(tensor: Tensor) -> Tensor:
        is_narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        return tensor.float() if is_narrow else tensor

    return tree_map_only(Tensor, widen, value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


@contextmanager
def _cast_state(holders: list[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Context manager in which parameters and buffers are casts; tied ones are cast once."""
    made: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    changed: list[tuple[Tensor, Tensor, int]] = []
    for module in holders:
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in both:
            for key, tensor in held.items():
                if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = low = tensor.to(dtype)
                    if held is module._buffers:
                        changed.append((tensor, low, low._version))
                replaced.append((held, key, tensor))
                held[key] = made[id(tensor)]
    _flatten_again(holders)
    try:
        yield
    finally:
        for held, key, tensor in replaced:
            held[key] = tensor
        _flatten_again(holders)
        with torch.no_grad():
            for tensor, low, version in changed:
                if low._version != version:
                    tensor.copy_(low)


def _flatten_again(holders: list[nn.Module]) -> None:
    """Update the second list of weights that RNN modules keep."""
    for module in holders:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [
                getattr(module, name, None) for name in module._flat_weights_names
            ]


@dataclass(slots=True)
class LossScale:
    """The factor of the loss before backward, which keeps float16 gradients from vanishing.

    It is a power of two, so that dividing by it later changes no bit. It starts at 2^16, halves
    after a step whose gradients were not finite, which is skipped, and doubles after 2000 steps
    without one. It is always 1 unless `is_dynamic`.
    """

    is_dynamic: bool
    value: float = 1.0
    num_good_steps: int = 0

    @classmethod
    def of(cls, spec: ExecutionSpec) -> "LossScale":
        """Make a job's scale: dynamic for float16, 1 for dtypes with the range of float32."""
        is_dynamic = low_dtype(spec) is torch.float16
        return cls(is_dynamic, _FIRST_SCALE if is_dynamic else 1.0)

    def up(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the scale, for backward."""
        return loss * self.value if self.is_dynamic else loss

    def unscale(self, params: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.is_dynamic:
            for param in params:
                if param.grad is not None:
                    param.grad.div_(self.value)

    def absorbs(self, what: str) -> bool:
        """Return whether to skip a step with non-finite `what`; if so, halve the scale.

        False if no smaller scale can help: for the loss itself, and once the scale is 2^-14.
        """
        can_help = self.is_dynamic and what.startswith("gradient") and self.value > _SMALLEST_SCALE
        if can_help:
            self.value, self.num_good_steps = self.value / 2, 0
        return can_help

    def keep(self) -> None:
        """Count an applied step; double the scale after every 2000."""
        self.num_good_steps += 1
        if self.is_dynamic and self.num_good_steps % _GROWTH_INTERVAL_STEPS == 0:
            self.value = min(2 * self.value, _LARGEST_SCALE)

    def metadata(self) -> dict[str, str]:
        """Return the scale as metadata of a state; empty if the scale is always 1."""
        if not self.is_dynamic:
            return {}
        return {"loss_scale": str(self.value), "num_good_steps": str(self.num_good_steps)}

    def load(self, metadata: Mapping[str, str]) -> None:
        """Load the scale from a state's metadata; without one it starts at 2^16."""
        if self.is_dynamic:
            self.value = float(metadata.get("loss_scale", _FIRST_SCALE))
            self.num_good_steps = int(metadata.get("num_good_steps", 0))


# ---- Layers that a device supports ----
#
# Each kind of layer is tried in each precision once, when needed. Processors without 16-bit units
# lack some primitives of the libraries that torch calls; which ones depends on the processor, the
# library and its settings, so there is no list of them.


class Numbers(NamedTuple):
    """A number format: the precision setting and its dtype."""

    precision: str
    """The precision setting; empty if layers keep their dtype."""
    dtype: torch.dtype
    """The dtype of matrix products for Mixed, of everything otherwise."""

    def __str__(self) -> str:
        """Return the words for messages, such as "Mixed in float16"."""
        return " in ".join(filter(None, (self.precision, name_of(self.dtype))))


ALL_NUMBERS: Final = (
    Numbers("Mixed", torch.bfloat16),
    Numbers("Mixed", torch.float16),
    Numbers("Half", torch.bfloat16),
    Numbers("Half", torch.float16),
    Numbers("Full", torch.float64),
    Numbers("Single", torch.float32),
)
SINGLE: Final = ALL_NUMBERS[-1]
"""The number format that all kinds of layer support."""
NUM_NAMES: Final = 3
"""Maximum number of layers named in an error message."""


class LayerKind(NamedTuple):
    """A small test layer of a kind, and the shapes of its inputs."""

    layer: type[nn.Module]
    make: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...]


KINDS: Final[dict[str, LayerKind]] = {
    "Linear": LayerKind(nn.Linear, lambda: nn.Linear(8, 8), ((4, 8),)),
    "Conv1d": LayerKind(nn.Conv1d, lambda: nn.Conv1d(4, 8, 3), ((2, 4, 8),)),
    "Conv2d": LayerKind(nn.Conv2d, lambda: nn.Conv2d(4, 8, 3), ((2, 4, 8, 8),)),
    "Conv3d": LayerKind(nn.Conv3d, lambda: nn.Conv3d(4, 8, 3), ((2, 4, 8, 8, 8),)),
    "ConvTranspose1d": LayerKind(
        nn.ConvTranspose1d, lambda: nn.ConvTranspose1d(4, 8, 3), ((2, 4, 8),)
    ),
    "ConvTranspose2d": LayerKind(
        nn.ConvTranspose2d, lambda: nn.ConvTranspose2d(4, 8, 3), ((2, 4, 8, 8),)
    ),
    "ConvTranspose3d": LayerKind(
        nn.ConvTranspose3d, lambda: nn.ConvTranspose3d(4, 8, 3), ((2, 4, 8, 8, 8),)
    ),
    "RNN": LayerKind(nn.RNN, lambda: nn.RNN(4, 8), ((3, 2, 4),)),
    "GRU": LayerKind(nn.GRU, lambda: nn.GRU(4, 8), ((3, 2, 4),)),
    "LSTM": LayerKind(nn.LSTM, lambda: nn.LSTM(4, 8), ((3, 2, 4),)),
    "LSTM with projections": LayerKind(nn.LSTM, lambda: nn.LSTM(4, 8, proj_size=3), ((3, 2, 4),)),
    "MultiheadAttention": LayerKind(
        nn.MultiheadAttention, lambda: nn.MultiheadAttention(8, 2), ((3, 2, 8),) * 3
    ),
}
"""The kinds of layer for which libraries have primitives; torch computes others in any precision. A
dictionary, so that tests can add a kind that no device supports."""


def check_able(
    modules: Iterable[tuple[str, nn.Module]],
    spec: ExecutionSpec,
    device: torch.device,
    *,
    trains: bool,
) -> None:
    """Raise InvalidInputError for modules that the device cannot compute in this precision.

    modules: all of a model, by name. trains: gradients are computed, too. Estimates with fake
    tensors are for another device and are not checked.
    """
    if isinstance(torch.empty(0), FakeTensor):
        return
    by_numbers: dict[Numbers, list[tuple[str, nn.Module]]] = {}
    for name, module in modules:
        by_numbers.setdefault(_numbers(spec, module), []).append((name, module))
    for asked, those in by_numbers.items():
        if asked.dtype != torch.float32:  # which every device can compute
            _check(asked, _layers(those), device, trains=trains)


def _check(
    asked: Numbers, layers: Mapping[str, list[str]], device: torch.device, *, trains: bool
) -> None:
    missing = _missing(asked, layers, device, trains)
    if not missing:
        return
    reasons = "; ".join(
        f"{kind} ({', '.join(layers[kind][:NUM_NAMES])}): {reason}"
        for kind, reason in missing.items()
    )
    able = [str(number) for number in ALL_NUMBERS if not _missing(number, layers, device, trains)]
    raise InvalidInputError.at(
        "execution.precision",
        f"this worker's {device_name(device)} cannot compute {asked}: {reasons}; "
        f"all layers of this model can have {', '.join(able)} there",
    )


def obstacles(device: torch.device) -> Iterator[tuple[Numbers, str, str]]:
    """Yield (number format, kind of layer, reason) for everything that the device cannot train."""
    for numbers in ALL_NUMBERS:
        for kind, reason in _missing(numbers, KINDS, device, True).items():
            yield numbers, kind, reason


@cache
def obstacle(kind: str, numbers: Numbers, device: torch.device, trains: bool) -> str | None:
    """Return torch's reason why the device cannot compute this kind of layer in this number format;
    None if it can.

    Errors that have another cause are raised and not cached: a lack of memory, and errors that also
    occur for a Linear layer in single precision.
    """
    try:
        _tried(KINDS[kind], numbers, device, trains)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a library may raise any type
        if numbers != SINGLE:
            _tried(KINDS["Linear"], SINGLE, device, trains)
        return str(error).partition("\n")[0].partition(". ")[0]
    return None


def _tried(kind: LayerKind, numbers: Numbers, device: torch.device, trains: bool) -> None:
    """Compute the layer as a job would, independently of the caller's torch modes."""
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")  # torch warns about its choice of an algorithm
        with torch.autocast(device.type, enabled=False):
            _compute(kind, numbers, device, trains)


def _numbers(spec: ExecutionSpec, module: nn.Module) -> Numbers:
    if spec.precision is None:
        dtypes = (p.dtype for p in module.parameters() if p.is_floating_point())
        return Numbers("", next(dtypes, torch.float32))
    wide = torch.float64 if spec.precision == "Full" else torch.float32
    return Numbers(spec.precision, low_dtype(spec) or wide)


def _missing(
    numbers: Numbers, kinds: Iterable[str], device: torch.device, trains: bool
) -> dict[str, str]:
    """Return the reasons for the kinds of layer that cannot be computed, keyed by kind."""
    by_kind = {kind: obstacle(kind, numbers, device, trains) for kind in kinds}
    return {kind: reason for kind, reason in by_kind.items() if reason is not None}


def _layers(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, list[str]]:
    """Return the names of layers, keyed by kind."""
    layers: dict[str, list[str]] = {}
    for name, module in modules:
        kind = _kind_of(module)
        if kind is not None:
            layers.setdefault(kind, []).append(name or "the model")
    return layers


def _kind_of(module: nn.Module) -> str | None:
    if isinstance(module, nn.LSTM) and module.proj_size:
        return "LSTM with projections"
    return next((name for name, kind in KINDS.items() if isinstance(module, kind.layer)), None)


def _compute(kind: LayerKind, numbers: Numbers, device: torch.device, trains: bool) -> None:
    """Run one layer on zeros, wrapped as in a job's model, without drawing random numbers."""
    with torch.device("meta"):
        layer = kind.make()
    low = numbers.precision in ("Mixed", "Half")
    wide = torch.float32 if low else numbers.dtype
    layer = layer.to_empty(device=device).to(wide).train(trains)
    forward: Forward = layer.forward
    if numbers.precision == "Mixed":
        forward = autocasting(forward, device, numbers.dtype)
    elif numbers.precision == "Half":
        forward = lowered(forward, layer, numbers.dtype)
    with torch.set_grad_enabled(trains):
        for param in layer.parameters():
            nn.init.zeros_(param)
        inputs = [
            torch.zeros(shape, device=device, dtype=wide, requires_grad=trains)
            for shape in kind.inputs
        ]
        output = forward(*inputs)
        while not isinstance(output, Tensor):
            output = output[0]
        if trains:
            output.sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # errors of kernels are reported later

"""Computing in 16 bits: autocast, 16-bit copies of the weights, and the scale of the loss.

Parameters and optimizer stay float32 in both cases, so that small updates are not lost and sums
over shards, clients and neighbours are taken in float32. Mixed precision as in Micikevicius et al.,
"Mixed Precision Training" (arXiv:1710.03740).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stratagem.common.job import ExecutionSpec

Forward = Callable[..., Any]

_FIRST_SCALE: Final = 2.0**16
_LARGEST_SCALE: Final = 2.0**24
_SMALLEST_SCALE: Final = 2.0**-14
_GROWTH_INTERVAL_STEPS: Final = 2000


def low_dtype(spec: ExecutionSpec) -> torch.dtype | None:
    """Returns the 16-bit dtype that Mixed and Half compute in; None for the others."""
    if spec.precision not in ("Mixed", "Half"):
        return None
    return torch.float16 if spec.amp_dtype == "float16" else torch.bfloat16


def autocasting(forward: Forward, device: torch.device, dtype: torch.dtype) -> Forward:
    """The forward pass with matrix products in `dtype`, as torch.autocast chooses them.

    Weights are cast at each use. A cache of casts would add up the gradients of several uses in
    16 bits, and would not be there when checkpointed activations are computed again.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            return forward(*args, **kwargs)

    return run


def lowered(forward: Forward, module: nn.Module, dtype: torch.dtype) -> Forward:
    """The forward pass with parameters, buffers and inputs as `dtype`.

    Batch and instance norm keep theirs: running statistics need more bits. Gradients arrive at the
    float32 parameters through the casts. What changes in a buffer is carried back.
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
    """Any nesting of tensors with 16-bit floats as float32: losses and metrics need the bits."""

    def widen(tensor: Tensor) -> Tensor:
        is_narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        return tensor.float() if is_narrow else tensor

    return tree_map_only(Tensor, widen, value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


@contextmanager
def _cast_state(holders: list[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Puts casts in the place of parameters and buffers; tied ones are cast once."""
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
    """RNNs keep a second list of their weights."""
    for module in holders:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [
                getattr(module, name, None) for name in module._flat_weights_names
            ]


@dataclass(slots=True)
class LossScale:
    """The factor of the loss before backward, which keeps float16 gradients from vanishing.

    It is a power of two, so that dividing by it later changes no bit. It starts at 2^16; halves
    after a step whose gradients were not finite, which is skipped; doubles after 2000 steps without
    one. Constantly 1 unless `is_dynamic`.
    """

    is_dynamic: bool
    value: float = 1.0
    num_good_steps: int = 0

    @classmethod
    def of(cls, spec: ExecutionSpec) -> "LossScale":
        """Makes a job's scale: dynamic for float16 only; other dtypes have the range of float32."""
        is_dynamic = low_dtype(spec) is torch.float16
        return cls(is_dynamic, _FIRST_SCALE if is_dynamic else 1.0)

    def up(self, loss: Tensor) -> Tensor:
        """Returns the loss multiplied by the scale, from which backward begins."""
        return loss * self.value if self.is_dynamic else loss

    def unscale(self, params: Iterable[nn.Parameter]) -> None:
        """Divides the gradients, in place."""
        if self.is_dynamic:
            for param in params:
                if param.grad is not None:
                    param.grad.div_(self.value)

    def absorbs(self, what: str) -> bool:
        """Returns whether a step whose `what` is not finite is to be skipped, and halves the scale.

        False where no scale can help: for the loss itself, and once the scale is 2^-14.
        """
        can_help = self.is_dynamic and what.startswith("gradient") and self.value > _SMALLEST_SCALE
        if can_help:
            self.value, self.num_good_steps = self.value / 2, 0
        return can_help

    def keep(self) -> None:
        """Counts a step that was applied; doubles the scale at every 2000th."""
        self.num_good_steps += 1
        if self.is_dynamic and self.num_good_steps % _GROWTH_INTERVAL_STEPS == 0:
            self.value = min(2 * self.value, _LARGEST_SCALE)

    def metadata(self) -> dict[str, str]:
        """Returns the scale as metadata of a state; empty where the scale is always 1."""
        if not self.is_dynamic:
            return {}
        return {"loss_scale": str(self.value), "num_good_steps": str(self.num_good_steps)}

    def load(self, metadata: Mapping[str, str]) -> None:
        """Restores the scale from a state's metadata; without one it begins at 2^16."""
        if self.is_dynamic:
            self.value = float(metadata.get("loss_scale", _FIRST_SCALE))
            self.num_good_steps = int(metadata.get("num_good_steps", 0))

"""The model's buffers (running statistics and the like) during a sharded step.

Every shard starts from the buffers as they were before the step. Afterwards floating-point buffers
become base + mean change over the shards, or just what the one shard made of them when there was
only one; integer buffers take the change that shard 0 made. The changes travel in the exchange's
extras, so they are summed in the same fixed order as gradients. The module does not know gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import UserCodeError

# Larger buffers (masks, tables) must be constant: their changes would have to travel every step.
MAX_TRAVELLING_ELEMENTS: Final = 1 << 18
_NOTHING: Final = torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class _Slot:
    module: nn.Module
    key: str
    name: str
    tensor: Tensor


class Buffers:
    """All persistent buffers of a model. Non-persistent buffers are ignored."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        slots = list(_slots(model))
        small = [slot for slot in slots if slot.tensor.numel() <= MAX_TRAVELLING_ELEMENTS]
        self._constants = [slot for slot in slots if slot.tensor.numel() > MAX_TRAVELLING_ELEMENTS]
        self._floats = [slot for slot in small if slot.tensor.is_floating_point()]
        self._integers = [slot for slot in small if not slot.tensor.is_floating_point()]
        self._slots = [*self._floats, *self._integers]
        self._num_floats = sum(slot.tensor.numel() for slot in self._floats)
        self.num_elements = sum(slot.tensor.numel() for slot in self._slots)
        self._base = [slot.tensor.clone() for slot in self._slots]
        self._versions = [slot.tensor._version for slot in self._constants]

    def snapshot(self) -> None:
        """Remember the present values as the buffers' values before the step."""
        _copy(self._base, [slot.tensor for slot in self._slots])
        self._versions = [slot.tensor._version for slot in self._constants]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values from before the step."""
        self._write(self._base)

    def take_over(self, other: "Buffers") -> None:
        """Copy the buffers of another model of the same kind, as the values before the step."""
        self._write([slot.tensor for slot in other._slots])
        self.snapshot()

    def contribution(self, shard: int, num_live: int) -> Tensor:
        """Return this shard's changes of the buffers, to be summed over all shards: 1-d float64."""
        self._check_constants()
        return self._changes(shard, num_live) if self._slots else _NOTHING

    @torch.no_grad()
    def _changes(self, shard: int, num_live: int) -> Tensor:
        after = [_current(slot) for slot in self._slots]
        split = len(self._floats)
        floats = self._flat(after[:split], torch.float64)
        if num_live > 1:
            before = self._flat(self._base[:split], torch.float64)
            # Equal values first: infinities (masks) have no difference.
            floats = torch.where(floats == before, 0.0, floats - before)
        integers = self._flat(after[split:], torch.int64)
        integers -= self._flat(self._base[split:], torch.int64)
        if shard != 0:
            integers.zero_()
        return torch.cat([floats, integers.to(torch.float64)]).cpu()

    def apply(self, total: Tensor, num_live: int) -> None:
        """Set the buffers after the step. total: begins with the sum of all shards' changes."""
        if self._slots:
            self._set(total[: self.num_elements], num_live)

    @torch.no_grad()
    def _set(self, total: Tensor, num_live: int) -> None:
        floats, integers = total.to(self._device).tensor_split((self._num_floats,))
        split = len(self._floats)
        if num_live > 1:
            floats = self._flat(self._base[:split], torch.float64) + floats / num_live
        integers = integers.round().to(torch.int64)
        integers = self._flat(self._base[split:], torch.int64) + integers
        self._write([*_parted(floats, self._floats), *_parted(integers, self._integers)])

    def _write(self, values: list[Tensor]) -> None:
        _copy([slot.tensor for slot in self._slots], values)
        for slot in self._slots:  # the model may have put another tensor in its place
            slot.module._buffers[slot.key] = slot.tensor

    def _flat(self, tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
        if not tensors:
            return torch.zeros(0, dtype=dtype, device=self._device)
        return torch.cat([tensor.detach().to(dtype).reshape(-1) for tensor in tensors])

    def _check_constants(self) -> None:
        for slot, version in zip(self._constants, self._versions, strict=True):
            if slot.module._buffers[slot.key] is not slot.tensor or slot.tensor._version != version:
                message = (
                    f'buffer "{slot.name}" changed during training; a buffer of more than '
                    f"{MAX_TRAVELLING_ELEMENTS} elements must be constant (or not persistent)"
                )
                raise UserCodeError("ValueError", message)


@contextmanager
def constant_buffers(model: nn.Module) -> Iterator[None]:
    """Context manager that checks that an evaluation leaves the model's buffers unchanged.

    Otherwise the workers' models would differ, since each evaluates other batches. Raises
    UserCodeError with the name of a buffer that a forward pass has changed.
    """
    before = [(slot, slot.tensor._version, _copy_if_small(slot.tensor)) for slot in _slots(model)]
    yield
    for slot, version, tensor in before:
        now = slot.module._buffers[slot.key]
        is_touched = now is not slot.tensor or now._version != version
        if is_touched and (tensor is None or not _are_equal(now, tensor)):
            message = (
                f'buffer "{slot.name}" changed while the model was evaluated; in eval mode '
                "(self.training is False) a forward pass must leave all persistent buffers as they "
                "are, for each worker evaluates other batches"
            )
            raise UserCodeError("ValueError", message)


def _copy_if_small(tensor: Tensor) -> Tensor | None:
    return tensor.clone() if tensor.numel() <= MAX_TRAVELLING_ELEMENTS else None


def _are_equal(value: Tensor | None, before: Tensor) -> bool:
    if value is None or value.shape != before.shape or value.dtype != before.dtype:
        return False
    are_both_nan = (value != value) & (before != before)
    return bool(((value == before) | are_both_nan).all())


def _current(slot: _Slot) -> Tensor:
    value = slot.module._buffers[slot.key]
    if value is None or value.shape != slot.tensor.shape:
        raise UserCodeError("ValueError", f'buffer "{slot.name}" changed its shape in training')
    return value


def _slots(model: nn.Module) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None and key not in module._non_persistent_buffers_set:
                name = f"{prefix}.{key}" if prefix else key
                slots.setdefault(id(tensor), _Slot(module, key, name, tensor))
    return list(slots.values())


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


def _parted(flat: Tensor, slots: list[_Slot]) -> list[Tensor]:
    sizes = [slot.tensor.numel() for slot in slots]
    parts = flat.split_with_sizes(sizes) if sizes else ()
    return [part.view(slot.tensor.shape) for part, slot in zip(parts, slots, strict=True)]

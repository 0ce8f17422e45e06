"""Check that a state has finite numbers, before it is committed or kept.

Initial values that are not finite, such as a mask of infinities, are no fault; values that become
so in training are. Buffers may have any values: a running maximum begins with an infinity, and a
mask may be filled again in any step.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.worker.engine.optimizers import AVERAGE
from stratagem.worker.engine.state_format import MODEL

_OF_MODEL: Final = re.compile(f"(?:^|/)(?:{MODEL}|{AVERAGE})")
_NATIVE: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Masks = dict[str, Tensor]
"""Masks of the elements that were not finite when training began, keyed by tensor name."""


def diverged(
    tensors: Mapping[str, Tensor], known: Masks, base: Callable[[], Mapping[str, Tensor]]
) -> str:
    """Return the name of a tensor with elements that have become infinite or NaN; "" if none.

    known: masks of the initial values; missing ones are computed from `base` and added.
    """
    given: Mapping[str, Tensor] | None = None
    for name, tensor in tensors.items():
        if _is_finite(tensor):
            continue
        if name not in known:
            given = base() if given is None else given
            before = _earlier(name, given)
            if before is None or before.shape != tensor.shape:
                before = torch.zeros(tensor.shape)
            known[name] = ~_elements(before)
        if bool((~_elements(tensor) & ~known[name]).any()):
            return name
    return ""


def parameters_of(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and averages in a state, without buffers. model: a model of the same
    structure."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    others = model.state_dict(keep_vars=True).keys() - params
    return {name: tensor for name, tensor in tensors.items() if _is_parameter(name, others)}


def _is_parameter(name: str, others: Collection[str]) -> bool:
    kind = _OF_MODEL.search(name)
    return kind is not None and name[kind.end() :] not in others


def _earlier(name: str, given: Mapping[str, Tensor]) -> Tensor | None:
    """Return a tensor's initial value; nodes, replicas and averages begin as the model."""
    if name in given:
        return given[name]
    kind = _OF_MODEL.search(name)
    return None if kind is None else given.get(f"{MODEL}{name[kind.end() :]}")


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite: minimum and maximum are NaN if an element is."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype not in _NATIVE:
        tensor = tensor.to(torch.float32)
    return all(math.isfinite(float(bound)) for bound in torch.aminmax(tensor.detach()))


def _elements(tensor: Tensor) -> Tensor:
    wide = tensor if tensor.dtype in _NATIVE else tensor.to(torch.float32)
    return torch.isfinite(wide.detach().cpu())

"""The check that a state has finite numbers, before it is committed or kept.

What a model begins with that is not finite, such as a mask of infinities, is no fault; what becomes
so in training is. Buffers may hold anything: a running maximum begins with an infinity, and a mask
may be filled again in any step.
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
"""By name of a tensor, which of its elements were not finite when training began."""


def diverged(
    tensors: Mapping[str, Tensor], known: Masks, base: Callable[[], Mapping[str, Tensor]]
) -> str:
    """Return the name of a tensor in which numbers are not finite that were; "" where none is.

    known: what was not finite before; what is missing is found in `base` and added.
    """
    given: Mapping[str, Tensor] | None = None
    for name, tensor in tensors.items():
        if _is_finite(tensor):
            continue
        if name not in known:
            given = base() if given is None else given
            before = _found(name, given)
            if before is None or before.shape != tensor.shape:
                before = torch.zeros(tensor.shape)
            known[name] = ~_elements(before)
        if bool((~_elements(tensor) & ~known[name]).any()):
            return name
    return ""


def parameters_of(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of the models in a state and the averages of these; `model` is one of
    the same form."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    others = model.state_dict(keep_vars=True).keys() - params
    return {name: tensor for name, tensor in tensors.items() if _is_parameter(name, others)}


def _is_parameter(name: str, others: Collection[str]) -> bool:
    kind = _OF_MODEL.search(name)
    return kind is not None and name[kind.end() :] not in others


def _found(name: str, given: Mapping[str, Tensor]) -> Tensor | None:
    """Return what a tensor was before; models apart and averages begin with the one model."""
    if name in given:
        return given[name]
    kind = _OF_MODEL.search(name)
    return None if kind is None else given.get(f"{MODEL}{name[kind.end() :]}")


def _is_finite(tensor: Tensor) -> bool:
    """One pass without a mask: the least and the greatest element are no numbers where one is
    none."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype not in _NATIVE:
        tensor = tensor.to(torch.float32)
    return all(math.isfinite(float(bound)) for bound in torch.aminmax(tensor.detach()))


def _elements(tensor: Tensor) -> Tensor:
    wide = tensor if tensor.dtype in _NATIVE else tensor.to(torch.float32)
    return torch.isfinite(wide.detach().cpu())

"""The dtypes of a model's floats: as it was built, unless the job's precision converts them.

Rows follow their model. Must not know training.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec

_OF_ROWS: Final = (torch.float32, torch.float64)


def converted_dtype(job: JobSpec) -> torch.dtype | None:
    """Return the dtype that the job's precision gives all floats of the model and of its rows; None
    where the model keeps its own."""
    match job.execution.precision:
        case None:
            return None
        case "Full":
            return torch.float64
        case _:
            return torch.float32


def rows_dtype(job: JobSpec, model: nn.Module) -> torch.dtype | None:
    """Return the dtype of floats in the rows for this model; None where they stay as the data give
    them.

    Without a precision they become what all floats of the model are: float32 or float64. Data for a
    model of several dtypes say best what it takes, and rounding to 16 bits would spoil targets.
    """
    wanted = converted_dtype(job)
    if wanted is not None:
        return wanted
    own = set(dtypes_of(model)) or {torch.float32}
    (only, *others) = own
    return only if not others and only in _OF_ROWS else None


def dtypes_of(model: nn.Module) -> Counter[torch.dtype]:
    """Return the dtypes of the model's parameters and buffers that are floats, with their numbers
    of tensors."""
    return Counter(tensor.dtype for _, tensor in _floats(model))


def convert(model: nn.Module, job: JobSpec) -> str:
    """Convert the model as the job's precision says, in place; return a sentence about what has
    another dtype now, "" for nothing."""
    wanted = converted_dtype(job)
    if wanted is None:
        return ""
    changed = dtypes_of(model)
    del changed[wanted]
    # `Module.to` would leave complex numbers without their imaginary part.
    model._apply(lambda each: each.to(wanted) if each.is_floating_point() else each)
    if not changed:
        return ""
    found = " and ".join(
        f"{counted(number, 'tensor')} of {name_of(dtype)}" for dtype, number in changed.items()
    )
    return (
        f"{job.execution.precision} converts {found} of the model to {name_of(wanted)}; without a "
        "precision they keep their dtypes"
    )


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype for messages, as "float32"."""
    return str(dtype).removeprefix("torch.")


def _floats(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor

"""Checks a model whose rows are to be protected, once it is built: before anything is trained."""

from itertools import islice
from typing import Final

import torch
from torch import nn

from stratagem.common.base.errors import Violation
from stratagem.common.job import JobSpec
from stratagem.common.job.privacy import mixes_rows
from stratagem.common.schema.document import refuse
from stratagem.worker.models.model_dtypes import name_of

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)

_TOO_NARROW: Final = (
    "which rounds the gradient of a row before it is clipped; float32 and float64 are allowed"
)


def check_rows_apart(job: JobSpec, model: nn.Module) -> None:
    """Raise InvalidInputError, naming each module that mixes the rows of a batch or keeps sums of
    them, and for a model of which nothing is trained."""
    if job.privacy is None or job.privacy.unit != "row":
        return
    wrong = [
        Violation("model", mixes_rows(name or "the model", type(module).__name__))
        for name, module in model.named_modules()
        if isinstance(module, _NORMS) and _keeps_sums(module)
    ]
    if not any(param.requires_grad for param in model.parameters()):
        wrong.append(Violation("model", "has no parameter that is trained"))
    narrow = (
        Violation("model", f"{name} is {name_of(param.dtype)}, {_TOO_NARROW}")
        for name, param in model.named_parameters()
        if param.requires_grad and param.dtype.itemsize < torch.float32.itemsize
    )
    wrong += islice(narrow, 1)
    refuse(wrong)


def _keeps_sums(module: nn.Module) -> bool:
    """Return whether a layer of statistics takes them over rows; InstanceNorm only keeps them."""
    is_batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
    is_instance = isinstance(module, nn.modules.instancenorm._InstanceNorm)
    return (is_batch and not is_instance) or bool(module.track_running_stats)

"""The memory modes of `execution.memory`: gathering of rows, and return of freed memory.

Pooled: storage of batches is reused. Cached: data sets are kept on the device. MinimalPeak:
gradients have storage from their first micro-batch's backward to the update only, and what was
freed goes back to the system. None of them changes a bit.
"""

import ctypes

import torch
from torch import nn

from stratagem.common.job import JobSpec
from stratagem.worker.data.batch_storage import BatchPool, DatasetCache
from stratagem.worker.data.datasets import Gather, Readers
from stratagem.worker.models.model_dtypes import rows_dtype


def make_gather(
    job: JobSpec, model: nn.Module, device: torch.device, readers: Readers | None = None
) -> Gather:
    """Makes a Gather that takes rows for the model as the job's memory setting says."""
    memory = job.execution.memory
    return Gather(
        rows_dtype(job, model),
        device,
        pool=BatchPool() if memory == "Pooled" else None,
        cache=DatasetCache() if memory == "Cached" else None,
        readers=readers,
    )


def give_back(device: torch.device) -> None:
    """Returns freed memory of this process, which others may then use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)

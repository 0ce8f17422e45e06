"""The place where a job is looked at: what may be imported, its data, and the kind of device."""

from dataclasses import dataclass, field
from typing import Any

import torch

from stratagem.common.job import JobSpec
from stratagem.worker.data.datasets import Dataset
from stratagem.worker.data.sources import DataSources, load_data
from stratagem.worker.data.streams import StreamDataset
from stratagem.worker.user_code.entrypoints import EntryPoints


@dataclass(frozen=True, slots=True)
class Site:
    """The place where a job would run: what may be imported, where data are, and the kind of
    device. It keeps the data of the last job, for further questions about that."""

    entrypoints: EntryPoints
    device: torch.device
    sources: DataSources
    _loaded: list[tuple[JobSpec, dict[str, Dataset]]] = field(
        default_factory=list, init=False, compare=False, repr=False
    )

    def data_of(self, job: JobSpec) -> dict[str, Dataset]:
        """Return the job's data by split: loaded, unless those of the last job are the same."""
        if not self._loaded or not _loads_alike(job, *self._loaded[0]):
            self._loaded.clear()  # before there are two of them in memory
            self._loaded.append((job, load_data(job, self.entrypoints, self.sources)))
        return dict(self._loaded[0][1])


def _loads_alike(job: JobSpec, known: JobSpec, data: dict[str, Dataset]) -> bool:
    """Return whether a job would load what another one has loaded. Streams know their job."""
    if any(isinstance(dataset, StreamDataset) for dataset in data.values()):
        return job == known
    return _read_by_loading(job) == _read_by_loading(known)


def _read_by_loading(job: JobSpec) -> tuple[Any, ...]:
    """Return all that decides which rows there are, and whether they are refused."""
    execution = job.execution
    return (
        *(job.data, job.partition, job.seed, job.only_evaluates, job.evaluation),
        *(execution.deterministic, execution.memory),
    )

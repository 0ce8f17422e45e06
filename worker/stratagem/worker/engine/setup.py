"""Collect the parts from which every kind of trainer is built, with its training rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stratagem.common.job import JobSpec
from stratagem.worker.data.datasets import Dataset, Gather, training_split
from stratagem.worker.data.order import BatchOrder, EpochRows, StreamOrder
from stratagem.worker.data.streams import StreamDataset
from stratagem.worker.engine.callbacks import NO_CALLBACKS, Callbacks
from stratagem.worker.engine.forward_backward import Rows, part
from stratagem.worker.engine.turns import make_optimizer_of
from stratagem.worker.numerics.model import ModelExecution
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.objectives.evaluator import Evaluator
from stratagem.worker.objectives.objective import Objective
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Trainer setup ----


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts of which one trainer is built: job, model, data, objective, evaluator, ..."""

    job: JobSpec
    model: nn.Module
    data: Mapping[str, Dataset]
    objective: Objective
    gather: Gather
    evaluator: Evaluator
    randomness: KeyedRandomness
    execution: ModelExecution
    numerics: int
    """Version of the rules that fix results bit for bit; see stratagem.common.numerics.rules."""
    entrypoints: EntryPoints
    epoch_rows: EpochRows | None = None
    """The order of the training rows; None to shuffle them in each epoch."""
    callbacks: Callbacks = NO_CALLBACKS
    conversion: str = ""
    """A sentence about tensors whose dtype was changed to the job's precision; "" if none was."""

    def optimizer_of(self, params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Make a new optimizer over these parameters, as the job defines it."""
        return make_optimizer_of(self.job, list(params), self.entrypoints)

    def batch_order(self) -> BatchOrder | StreamOrder:
        """Make the order in which training rows form batches."""
        train = self.data["train"]
        if isinstance(train, StreamDataset):
            return StreamOrder(self.job.batch_size)
        return BatchOrder(len(train), self.job.batch_size, self.job.seed, self.epoch_rows)

    @property
    def num_rows(self) -> dict[str, int]:
        """Number of rows per split; 0 for a stream, whose length is not known in advance."""
        return {split: len(dataset) for split, dataset in self.data.items()}

    @property
    def notes(self) -> list[str]:
        """Return sentences about settings that this worker applies differently than written."""
        return self.execution.notes


# ---- Training rows ----
#
# `TrainingRows` says which rows each training step has, and up to where the data has been read.


@dataclass(frozen=True, slots=True)
class Batch:
    """The global batch of the step after `step` applied ones."""

    step: int
    epoch: int
    indices: Tensor
    num_rows: int
    """Number of rows over all shards."""


class TrainingRows:
    """The training rows in the order of a job's steps. Used by one thread."""

    def __init__(self, setup: Setup) -> None:
        job, self._seed, self._dataset = setup.job, setup.job.seed, training_split(setup.data)
        self.window = job.window
        """The rules for cutting rows into micro-batches."""
        self._order = setup.batch_order()
        self.num_steps = job.steps or (job.epochs or 0) * self._order.steps_per_epoch

    def batch(self, step: int) -> Batch:
        """Return the batch of the step after `step` applied ones."""
        epoch, indices = self._order.batch(step)
        return Batch(step, epoch, indices, indices.shape[0])

    def rows(self, batch: Batch, cut: range) -> Rows:
        """Return a range of the rows of a batch."""
        key = (self._seed, "row", batch.epoch)
        indices = part(batch.indices, cut)
        return Rows(self._dataset, indices, f"training step {batch.step + 1}", key)

    def stream_marks(self) -> dict[int, str]:
        """Return the read position (mark) of each stream read here, as JSON; maybe none."""
        return self._dataset.marks() if isinstance(self._dataset, StreamDataset) else {}

    def add_stream_marks(self, marks: Mapping[int, str]) -> None:
        """Add read positions of any streams, to continue from. They do not change any rows."""
        if isinstance(self._dataset, StreamDataset):
            self._dataset.add_marks(marks)

"""The parts from which every kind of trainer is built are collected here, with its training
rows.
"""

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
    """The parts of one trainer: job, model, data, objective, evaluator, randomness, execution."""

    job: JobSpec
    model: nn.Module
    data: Mapping[str, Dataset]
    objective: Objective
    gather: Gather
    evaluator: Evaluator
    randomness: KeyedRandomness
    execution: ModelExecution
    numerics: int
    """Version of the rules that decide the bits; see stratagem.common.numerics.rules."""
    entrypoints: EntryPoints
    epoch_rows: EpochRows | None = None
    """The order of the training rows; they are shuffled unless set."""
    callbacks: Callbacks = NO_CALLBACKS
    conversion: str = ""
    """A sentence about tensors whose dtype the job's precision has changed; "" for none."""

    def optimizer_of(self, params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """A fresh optimizer of these parameters, as the job says."""
        return make_optimizer_of(self.job, list(params), self.entrypoints)

    def batch_order(self) -> BatchOrder | StreamOrder:
        """Make the order of the training batches."""
        train = self.data["train"]
        if isinstance(train, StreamDataset):
            return StreamOrder(self.job.batch_size)
        return BatchOrder(len(train), self.job.batch_size, self.job.seed, self.epoch_rows)

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows per split; 0 of a stream, whose rows are not known before they are read."""
        return {split: len(dataset) for split, dataset in self.data.items()}

    @property
    def notes(self) -> list[str]:
        """Sentences about settings that are carried out in another way than they say."""
        return self.execution.notes


# ---- Training rows ----
#
# `TrainingRows` says which rows each training step has, and up to where the data has been read.


@dataclass(frozen=True, slots=True)
class Batch:
    """The global batch of the step that follows `step` applied ones."""

    step: int
    epoch: int
    indices: Tensor
    num_rows: int
    """All of them, of all shards."""


class TrainingRows:
    """The split "train" in the order of a job's steps. Used by one thread."""

    def __init__(self, setup: Setup) -> None:
        job, self._seed, self._dataset = setup.job, setup.job.seed, training_split(setup.data)
        self.window = job.window
        """The rules by which rows are cut into micro-batches."""
        self._order = setup.batch_order()
        self.num_steps = job.steps or (job.epochs or 0) * self._order.steps_per_epoch

    def batch(self, step: int) -> Batch:
        """Return the batch that comes after so many steps."""
        epoch, indices = self._order.batch(step)
        return Batch(step, epoch, indices, indices.shape[0])

    def rows(self, batch: Batch, cut: range) -> Rows:
        """Return some rows of a batch."""
        key = (self._seed, "row", batch.epoch)
        indices = part(batch.indices, cut)
        return Rows(self._dataset, indices, f"training step {batch.step + 1}", key)

    def stream_marks(self) -> dict[int, str]:
        """Return a mark of each stream of rows that is read here, as JSON; none for other rows."""
        return self._dataset.marks() if isinstance(self._dataset, StreamDataset) else {}

    def add_stream_marks(self, marks: Mapping[int, str]) -> None:
        """Take over marks of any streams, to read on from. No bit depends on them."""
        if isinstance(self._dataset, StreamDataset):
            self._dataset.add_marks(marks)

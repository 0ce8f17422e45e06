"""The rows that each training step of a job has, and where in them reading has come to."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from stratagem.worker.data.datasets import training_split
from stratagem.worker.data.stream_dataset import StreamDataset
from stratagem.worker.engine.step.forward_backward import Rows, part
from stratagem.worker.engine.trainers.trainer_setup import Setup


@dataclass(frozen=True, slots=True)
class Batch:
    """The global batch of the step that follows `step` applied ones."""

    step: int
    epoch: int
    indices: Tensor

    @property
    def num_rows(self) -> int:
        """All of them, of all shards."""
        return self.indices.shape[0]


class TrainingRows:
    """The split "train" in the order of a job's steps. Used by one thread."""

    def __init__(self, setup: Setup) -> None:
        job, self._seed, self._dataset = setup.job, setup.job.seed, training_split(setup.data)
        self.window = job.window
        """How rows are cut into micro-batches."""
        self._order = setup.batch_order()
        self.num_steps = job.steps or (job.epochs or 0) * self._order.steps_per_epoch

    def batch(self, step: int) -> Batch:
        """Returns the batch that comes after so many steps."""
        return Batch(step, *self._order.batch(step))

    def rows(self, batch: Batch, cut: range) -> Rows:
        """Returns some rows of a batch."""
        key = (self._seed, "row", batch.epoch)
        indices = part(batch.indices, cut)
        return Rows(self._dataset, indices, f"training step {batch.step + 1}", key)

    def stream_marks(self) -> dict[int, str]:
        """Returns a mark of each stream of rows that is read here, as JSON; none for other rows."""
        return self._dataset.marks() if isinstance(self._dataset, StreamDataset) else {}

    def add_stream_marks(self, marks: Mapping[int, str]) -> None:
        """Takes over marks of any streams, to read on from. No bit depends on them."""
        if isinstance(self._dataset, StreamDataset):
            self._dataset.add_marks(marks)

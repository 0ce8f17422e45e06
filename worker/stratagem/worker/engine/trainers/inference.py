"""A model that is only run: what a job without gradients holds on a worker.

No graph is recorded and no optimizer is there, so the memory is that of the weights and of one
batch. Full batches are compiled where the job says so: nothing else runs. Knows no coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.data.datasets import Dataset
from stratagem.worker.engine.objectives.evaluator import EvaluationPart
from stratagem.worker.engine.step import state_format
from stratagem.worker.engine.trainers.trainer_setup import Setup


class Inference:
    """Model and data of one session. Used by one thread."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.job, self.model = setup, setup.job, setup.model
        self._data, self._evaluator = setup.data, setup.evaluator
        self._execution = setup.execution
        spec = self.job.evaluation
        assert spec is not None  # the job was checked
        self._batch_size = spec.batch_size
        self.model.eval()
        self.dataset(spec.split)

    def dataset(self, split: str) -> Dataset:
        """A split's rows; raises InvalidInputError naming evaluation.split."""
        if split not in self._data:
            known = ", ".join(self._data)
            raise InvalidInputError.at("evaluation.split", f'no split "{split}"; there is {known}')
        return self._data[split]

    def num_batches(self, split: str) -> int:
        """Returns the number of batches of a whole split; the last one may be short."""
        return -(-len(self.dataset(split)) // self._batch_size)

    def rows_in(self, split: str, batch: int) -> int:
        """Returns the number of rows in one batch of a split."""
        return min(self._batch_size, len(self.dataset(split)) - batch * self._batch_size)

    @torch.inference_mode()
    def part(
        self, split: str, batch: int, outputs: dict[str, Tensor] | None = None
    ) -> EvaluationPart:
        """The sums over one batch, which do not depend on what was evaluated before.

        outputs: gets copies of the model's outputs on the CPU, (rows, ...) each: `output`, or
        `output.<key>` of a model that gives several.
        """

        def keep(output: Any, num_rows: int) -> None:
            if outputs is not None:
                outputs.update(_copies("output", output, num_rows))

        self._execution.begin_batch(self.rows_in(split, batch))
        return self._evaluator.part(split, self.dataset(split), batch, keep)

    def copy_state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """(the model's tensors by name, metadata), copied to the CPU; step 0."""
        tensors = state_format.copied(state_format.model_state(self.model))
        return tensors, state_format.state_metadata(step=0)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over the model of a state; what else stands in it is passed over."""
        state_format.load_model_state(self.model, tensors)


def _copies(name: str, output: Any, num_rows: int) -> Iterator[tuple[str, Tensor]]:
    match output:
        case Tensor() if output.shape[:1] == (num_rows,):
            yield name, torch.empty_like(output, device="cpu").copy_(output).contiguous()
        case Mapping():
            for key, each in output.items():
                yield from _copies(f"{name}.{key}", each, num_rows)
        case tuple() | list():
            for key, each in enumerate(output):
                yield from _copies(f"{name}.{key}", each, num_rows)
        case _:
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            text = f"the model's {name} is no tensor of {num_rows} rows, but {found}"
            raise InvalidInputError.at("evaluation.predictions", text)

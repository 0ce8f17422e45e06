"""A model that is only run: a stored state that is evaluated, in a job that trains or in one that
does not.

No graph is recorded and no optimizer is there, so the memory is that of the weights and of one
batch. Where nothing is trained, full batches are compiled if the job says so. Knows no coordinator.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.engine.objectives.evaluator import EvaluationPart
from stratagem.worker.engine.step import state_format
from stratagem.worker.engine.trainers.trainer_setup import Setup


class Inference:
    """Model and data of one session. Used by one thread."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.job, self.model = setup, setup.job, setup.model
        self.evaluator = setup.evaluator
        self.num_steps = 0
        self.model.eval()
        if self.job.evaluation is not None:
            self.evaluator.dataset(self.job.evaluation.split)

    def part(
        self, split: str, batch: int, outputs: dict[str, Tensor] | None = None
    ) -> EvaluationPart:
        """The sums over one batch, which do not depend on what was evaluated before.

        outputs: gets copies of the model's outputs on the CPU, (rows, ...) each: `output`, or
        `output.<key>` of a model that gives several.
        """

        def keep(output: Any, num_rows: int) -> None:
            assert outputs is not None
            outputs.update(_copies("output", output, num_rows))

        # A model that is trained may compute gradients of its own inside its forward pass.
        with torch.inference_mode(self.job.only_evaluates):
            return self.evaluator.part(split, batch, None if outputs is None else keep)

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
            for key, item in output.items():
                yield from _copies(f"{name}.{key}", item, num_rows)
        case tuple() | list():
            for key, item in enumerate(output):
                yield from _copies(f"{name}.{key}", item, num_rows)
        case _:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            text = f"the model's {name} is no tensor of {num_rows} rows, but {shape}"
            raise InvalidInputError.at("evaluation.predictions", text)

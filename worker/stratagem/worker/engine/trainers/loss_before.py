"""The mean loss of a state over the training rows of one client, before it trains them.

The model is in eval mode and nothing is differentiated. The rows are read in their order, in
batches of the job's batch size, as an evaluation of the split reads them; so the loss is a function
of the state and the rows alone, the same in whichever round it is measured.
"""

from collections.abc import Callable

from torch import nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.data.datasets import Dataset
from stratagem.worker.data.stream_dataset import StreamDataset
from stratagem.worker.engine.objectives.evaluator import EvaluationShare, Evaluator
from stratagem.worker.engine.step.forward_backward import Passes

_SPLIT = "train"


def loss_before(
    model: nn.Module, passes: Passes, data: Dataset, batch_size: int, check: Callable[[], None]
) -> float:
    """Return Σ mean loss · weight / Σ weight of all batches, NaN where nothing counts.

    check: called before each batch; may raise to end it. Raises InvalidInputError for rows that
    come as a stream.
    """
    if isinstance(data, StreamDataset):
        text = "needs training rows with a len(): a stream would be read once more in each round"
        raise InvalidInputError.at("strategy.options.q", text)
    evaluator = Evaluator(
        *(model, {_SPLIT: data}, passes.execution, passes.randomness, passes.gather),
        *(passes.objective, {}, batch_size),
    )
    model.eval()
    share = EvaluationShare((_SPLIT,), 0, 1, lambda _batch, _left: check(), {})
    total = weight = 0.0
    for part in evaluator.parts_of(share):
        total += part.sums["loss"]
        weight += part.weight
    return total / weight if weight else float("nan")

"""Evaluation and predictions of a rank of a pipeline: forward only, batch behind batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.pipeline.schedules import forward_only
from stratagem.worker.engine.objectives.evaluator import EvaluationPart
from stratagem.worker.pipeline.rank_pass import PassCallbacks, RankPass
from stratagem.worker.pipeline.rank_setup import RunnerSetup

_WINDOW_PER_STAGE: Final = 2

Begins = Callable[[int, int], None]
"""(batch, how many are left with it): called for each batch that begins here."""


def evaluate(
    setup: RunnerSetup, number: int, split: str, begins: Begins | None
) -> list[EvaluationPart]:
    """Returns the sums per batch on the rank of the last stage; nothing on the others. number: of
    the pass."""
    parts: list[EvaluationPart] = []

    def measure(output: Any, y: Any, num_rows: int, batch: int) -> None:
        parts.append(setup.evaluator.measure(split, batch, output, y, num_rows))

    _forward(setup, number, split, measure, begins)
    return parts


def predict(setup: RunnerSetup, number: int, split: str) -> list[Any]:
    """Returns the model's output per batch on the rank of the last stage; nothing on the others."""
    outputs: list[Any] = []
    _forward(setup, number, split, lambda output, *_: outputs.append(output), None)
    return outputs


def _forward(
    setup: RunnerSetup,
    number: int,
    split: str,
    use: Callable[[Any, Any, int, int], None],
    begins: Begins | None,
) -> None:
    """Does one pass over all batches; use(output, y, rows, batch) is called on the rank of the last
    stage."""
    if split not in setup.data:
        known = ", ".join(setup.data)
        raise InvalidInputError.at("evaluation.split", f'no split "{split}"; there is {known}')
    evaluator, lane, dataset = setup.evaluator, setup.lane, setup.data[split]
    count = -(-len(dataset) // evaluator.batch_size)
    setup.model.eval()
    work = PassCallbacks(
        f"evaluating {split}",
        _beginning(setup, split, count, begins),
        lambda batch: evaluator.begin_batch(split, dataset, batch),
        use,
    )
    one_pass = RankPass(lane, setup.parts, number, count)
    try:
        lane.transport.begin(number, one_pass.awaited())
        actions = forward_only(lane.rank_of, count)[lane.rank] if count else ()
        one_pass.forward_only(actions, work, _WINDOW_PER_STAGE * len(lane.rank_of))
        lane.transport.end(lane.timeout_s)
    except BaseException:
        lane.transport.cut()
        raise
    finally:
        evaluator.randomness.end()


def _beginning(
    setup: RunnerSetup, split: str, count: int, begins: Begins | None
) -> Callable[[int], None]:
    """Returns the function that prepares each batch, at each stage here."""
    evaluator, num_all, num_begun = setup.evaluator, len(setup.data[split]), 0

    def begin(batch: int) -> None:
        nonlocal num_begun
        if begins is not None and batch >= num_begun:  # not again for further stages here
            begins(batch, count - batch)
            num_begun = batch + 1
        if setup.job.only_evaluates:
            num_rows = min(evaluator.batch_size, num_all - batch * evaluator.batch_size)
            setup.execution.begin_batch(num_rows)
        evaluator.randomness.begin("evaluate", split, batch)

    return begin

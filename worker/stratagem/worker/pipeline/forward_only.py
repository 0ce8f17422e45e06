"""Evaluation of a rank of a pipeline: forward only, batch behind batch."""

from typing import Any, Final

from stratagem.common.pipeline.schedules import forward_only
from stratagem.worker.engine.objectives.evaluator import Begins, EvaluationPart
from stratagem.worker.pipeline.rank_pass import PassCallbacks, RankPass
from stratagem.worker.pipeline.rank_setup import RunnerSetup

_WINDOW_PER_STAGE: Final = 2


def evaluate(
    setup: RunnerSetup, number: int, split: str, begins: Begins | None
) -> list[EvaluationPart]:
    """Returns the sums per batch on the rank of the last stage; nothing on the others. number: of
    the pass."""
    evaluator, lane = setup.evaluator, setup.lane
    count, num_begun = evaluator.num_batches(split), 0
    parts: list[EvaluationPart] = []

    def begin(batch: int) -> None:
        nonlocal num_begun
        if begins is not None and batch >= num_begun:  # not again for further stages here
            begins(batch, count - batch)
            num_begun = batch + 1
        evaluator.begin(split, batch)

    def measure(output: Any, y: Any, num_rows: int, batch: int) -> None:
        parts.append(evaluator.measure(split, batch, output, y, num_rows))

    reading = [part for part in setup.parts.values() if part.reads_input or part.is_last]
    evaluator.expect((split, batch) for batch in range(count) for _ in reading)
    setup.model.eval()
    work = PassCallbacks(
        f"evaluating {split}", begin, lambda batch: evaluator.load(split, batch), measure
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
    return parts

"""Training that is steered by its evaluations, as a loop: train, evaluate, decide, train on."""

from collections.abc import Callable, Mapping

from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.evaluation_loop import evaluation_loop
from tests.reference.loops import Result


def stopped_loop(
    job: JobSpec, entrypoints: EntryPoints, train: Callable[[int], Result], ends: list[int]
) -> tuple[int, Mapping[str, Tensor]]:
    """(steps, state) at which the job's `evaluation.stop` ends the training, or its last ones.

    train(n): any of the loops after n steps, or rounds. ends: where the job evaluates.
    """
    assert job.evaluation is not None
    stop = job.evaluation.stop
    assert stop is not None
    name = f"{job.evaluation.split}.{stop.metric or job.evaluation.best}"
    sign = 1.0 if (stop.mode or job.evaluation.mode) == "max" else -1.0
    best, num_without = -float("inf"), 0
    for end in ends:
        state = train(end).state
        value = sign * evaluation_loop(job, entrypoints, state)[name]
        if value > best + stop.min_delta:
            best, num_without = value, 0
        else:
            num_without += 1
        if num_without == stop.patience:
            return end, state
    return ends[-1], state

"""The state machine of phase training, observed: the schedule is walked with all checks' outcomes.

An arrow is a step of the schedule that really happened, labelled by what brought it about.
"""

from collections.abc import Iterator

from stratagem.common.job.schedules import PhasesSpec
from stratagem.worker.phases import schedule
from stratagem.worker.phases.schedule import Quality, State, TrainingPhase

_SPEC = PhasesSpec(full_steps=2, predict_steps=3, correct_every=2)
_GOOD, _BAD = Quality(0.0, 1.0), Quality(1.0, 0.0)
_DEPTH = 12
_LABELS = {
    (TrainingPhase.FULL, TrainingPhase.FULL): "full_steps not done, or the back-test failed",
    (TrainingPhase.FULL, TrainingPhase.PREDICT): "full_steps done, the back-test passed",
    (TrainingPhase.PREDICT, TrainingPhase.PREDICT): "budget left",
    (
        TrainingPhase.PREDICT,
        TrainingPhase.CORRECT,
    ): "correct_every predictions since the last exact gradient",
    (TrainingPhase.PREDICT, TrainingPhase.FULL): "predict_steps done",
    (TrainingPhase.CORRECT, TrainingPhase.PREDICT): "the prediction was good",
    (TrainingPhase.CORRECT, TrainingPhase.FULL): "it was not, or the loss jumped",
}


def arrow_table() -> str:
    """Return a table of the transitions between phases; KeyError for an arrow without a label."""
    arrows = sorted(set(_walk(schedule.initial(_SPEC), _DEPTH)))
    rows = [f"| {source} | {target} | {_LABELS[source, target]} |" for source, target in arrows]
    head = ["| from | to | when |", "|---|---|---|", "| *(begin)* | FULL | |"]
    return "\n".join([*head, *rows])


def _walk(state: State, depth: int) -> Iterator[tuple[TrainingPhase, TrainingPhase]]:
    if depth == 0:
        return
    opened = schedule.begin(state, _SPEC)
    if state.total_step:
        yield state.phase, opened.phase
    if not opened.phase.is_exact:
        yield from _walk(schedule.end(opened, _SPEC), depth - 1)
        return
    for check in (_GOOD, _BAD):
        yield from _walk(schedule.end(opened, _SPEC, 1.0, (check,)), depth - 1)

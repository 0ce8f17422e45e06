"""Checks that a job can go on from a commit of another run with its optimizer and its step.

What the state was trained with has to stay: the model, the data and their order, what decides the
bits of a step. What only says how the training goes on may be another.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.job import JobSpec
from stratagem.common.schema.json_text import JSON

MAY_CHANGE: Final = (
    *("name", "initial", "epochs", "steps", "strategy.rounds"),
    *("optimizer", "evaluation", "checkpoint", "callbacks"),
    *("retention", "placement_timeout_s"),
)
"""Fields that may differ, with all below them, unless they are in MUST_STAY."""
MUST_STAY: Final = {
    "optimizer.name": "the state holds what that optimizer keeps for each parameter",
    "optimizer.entrypoint": "the state holds what that optimizer keeps for each parameter",
    "model": "the state is that of this model",
    "data": "the step of the run is a place in these data",
    "batch_size": "the step of the run is a place in the data, counted in batches of this size",
    "seed": "the order of the rows and all random numbers follow from it",
    "strategy.type": "another strategy makes other steps",
    "strategy.num_replicas": "the shards of a batch decide the bits of a step",
    "strategy": "it decides the bits of the steps",
}
_OTHERS: Final = "it decides the bits of the steps"


def check_resumed_job(earlier: Mapping[str, Any], job: JobSpec) -> None:
    """Raise InvalidInputError for every field that the job must have in common with the job of the
    run that it resumes, and has not."""
    before = JobSpec.parse(earlier).document()
    changed = _changed(before, job.document())
    if violations := [each for each in map(_violation, changed) if each is not None]:
        raise InvalidInputError(violations=violations)


def _changed(
    before: Mapping[str, JSON], after: Mapping[str, JSON], path: str = ""
) -> Iterator[str]:
    """Yield the paths at which two documents differ; of a list, that of the whole list."""
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        inner = f"{path}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changed(old, new, f"{inner}.")
        else:
            yield inner


def _violation(path: str) -> Violation | None:
    """Return what is wrong with a change; the rule of the longest beginning of its path counts."""
    parts = path.split(".")
    for prefix in (".".join(parts[:n]) for n in range(len(parts), 0, -1)):
        if prefix in MAY_CHANGE:
            return None
        if prefix in MUST_STAY:
            return Violation(path, f"must stay as it was in the run: {MUST_STAY[prefix]}")
    return Violation(path, f"must stay as it was in the run: {_OTHERS}")

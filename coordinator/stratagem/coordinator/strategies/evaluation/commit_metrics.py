"""The metrics with which a state is committed: of its training, and of an evaluation with it."""

from collections.abc import Mapping
from typing import Final

from stratagem.common.job import JobSpec
from stratagem.common.job.fields import of_metric

LOGGED: Final = "evaluation."
"""Before the names of what the user's on_evaluation has logged."""


def is_evaluated(job: JobSpec, name: str) -> bool:
    """Return True for a name that a metric of the job's evaluations has in a commit: its own, or,
    of a metric of the user's with several values, followed by theirs; that of its spread over
    clients; or what was logged of it."""
    spec = job.evaluation
    if spec is None:
        return False
    if name.startswith(LOGGED):
        return True
    name = of_metric(name)
    names = [f"{spec.split}.{each}" for each in ("loss", *spec.metrics)]
    return name in names or any(":" in own and name.startswith(f"{own}.") for own in names)


def commit_metrics(
    job: JobSpec, trained: Mapping[str, float], evaluated: Mapping[str, float] | None = None
) -> tuple[tuple[str, float], ...]:
    """Return the metrics of a commit by name, sorted.

    A metric of training that has the name of an evaluated one (`train.loss`, where the split that
    is evaluated is train) is left out: the commit would seem to have been evaluated.
    """
    kept = {name: value for name, value in trained.items() if not is_evaluated(job, name)}
    return tuple(sorted({**kept, **(evaluated or {})}.items()))

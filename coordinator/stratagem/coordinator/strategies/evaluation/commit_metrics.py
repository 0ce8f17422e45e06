"""The metrics with which a state is committed: of its training, and of an evaluation with it."""

from collections.abc import Mapping

from stratagem.common.job import JobSpec


def evaluated_names(job: JobSpec) -> frozenset[str]:
    """Return the names that the metrics of the job's evaluations have in a commit."""
    spec = job.evaluation
    if spec is None:
        return frozenset()
    return frozenset(f"{spec.split}.{name}" for name in ("loss", *spec.metrics))


def commit_metrics(
    job: JobSpec, trained: Mapping[str, float], evaluated: Mapping[str, float] | None = None
) -> tuple[tuple[str, float], ...]:
    """Return the metrics of a commit by name, sorted.

    A metric of training that has the name of an evaluated one (`train.loss`, where the split that
    is evaluated is train) is left out: the commit would seem to have been evaluated.
    """
    own = evaluated_names(job)
    kept = {name: value for name, value in trained.items() if name not in own}
    return tuple(sorted({**kept, **(evaluated or {})}.items()))

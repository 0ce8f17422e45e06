"""Derives values from a job: other jobs with some fields set, the code that it names."""

from collections.abc import Mapping

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job.spec import JobSpec
from stratagem.common.schema.json_text import JSON


def with_fields(job: JobSpec, values: Mapping[str, JSON]) -> JobSpec:
    """The job with fields such as "optimizer.lr" set; None takes a field away.

    Raises InvalidInputError when a path leads through a value or the job becomes invalid.
    """
    document = job.document()
    for path, value in values.items():
        *parents, last = path.split(".")
        place = document
        for depth, key in enumerate(parents):
            inner = place.setdefault(key, {})
            if not isinstance(inner, dict):
                taken = ".".join(parents[: depth + 1])
                raise InvalidInputError.at(path, f"{taken!r} is a value and holds no fields")
            place = inner
        kwargs = place.get("kwargs")
        if isinstance(kwargs, dict):
            # An optimizer's further keys stand in kwargs once the job has been read.
            kwargs.pop(last, None)
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return JobSpec.parse(document)


def entry_points(job: JobSpec) -> tuple[str, ...]:
    """Exactly what the job names of the user's code; nothing else may be imported."""
    own = job.evaluation
    metrics = (*own.metrics, own.keep) if own else ()
    order = job.data.order
    data = [job.data.entrypoint, job.data.collate]
    data += [order.entrypoint, order.weights, order.lengths] if order else []
    named = [job.model.entrypoint, *data, job.loss.entrypoint, *metrics]
    return tuple(dict.fromkeys(name for name in named if name is not None and ":" in name))

"""Derives values from a job: other jobs with some fields set, the code that it names."""

from collections.abc import Mapping

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job.spec import JobSpec
from stratagem.common.schema.json_text import JSON
from stratagem.common.strategy.search_space import Categorical, Ordinal, plain


def with_fields(job: JobSpec, values: Mapping[str, JSON]) -> JobSpec:
    """The job with fields such as "optimizer.lr" set; None takes a field away. An item of a list is
    found by its name, as in "optimizer.groups.head.lr".

    Raises InvalidInputError when a path leads through a value or the job becomes invalid.
    """
    document = job.document()
    for path, value in values.items():
        *parents, last = path.split(".")
        place: dict[str, JSON] | list[JSON] = document
        for depth, key in enumerate(parents):
            inner = _named(place, key) if isinstance(place, list) else place.setdefault(key, {})
            if not isinstance(inner, dict | list):
                taken = ".".join(parents[: depth + 1])
                raise InvalidInputError.at(path, f"{taken!r} is a value and holds no fields")
            place = inner
        if not isinstance(place, dict):
            raise InvalidInputError.at(path, "is a list; name the item whose field is meant")
        kwargs = place.get("kwargs")
        if isinstance(kwargs, dict):
            # An optimizer's further keys stand in kwargs once the job has been read.
            kwargs.pop(last, None)
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return JobSpec.parse(document)


def _named(items: list[JSON], name: str) -> JSON:
    """The item of a list that has this name; None if there is none."""
    mappings = (item for item in items if isinstance(item, dict))
    return next((item for item in mappings if item.get("name") == name), None)


def entry_points(job: JobSpec) -> tuple[str, ...]:
    """Exactly what the job names of the user's code; nothing else may be imported."""
    return tuple(dict.fromkeys(entry_points_by_field(job).values()))


def entry_points_by_field(job: JobSpec) -> dict[str, str]:
    """The entry points that the job names, by the path of the field that names each."""
    data, order, evaluation = job.data, job.data.order, job.evaluation
    named: dict[str, str | None] = {
        "model.entrypoint": job.model.entrypoint,
        "data.entrypoint": data.entrypoint,
        "data.collate": data.collate,
        "loss.entrypoint": None if job.loss is None else job.loss.entrypoint,
        "step": job.step,
        "predict": job.predict,
        "callbacks": job.callbacks,
    }
    if order is not None:
        named["data.order.entrypoint"] = order.entrypoint
        named["data.order.weights"] = order.weights
        named["data.order.lengths"] = order.lengths
    if evaluation is not None:
        named["evaluation.keep"] = evaluation.keep
        for place, metric in enumerate(evaluation.metrics):
            named[f"evaluation.metrics[{place}]"] = metric
    for place, turn in enumerate(job.turns or ()):
        named[f"turns[{place}].step"] = turn.step
    for path, optimizer in job.optimizers().items():
        for each in optimizer.rules():
            field = f"{path}{each.path.removeprefix('optimizer')}.entrypoint"
            named[field] = each.rule.entrypoint
        if optimizer.schedule is not None:
            named[f"{path}.schedule.entrypoint"] = optimizer.schedule.entrypoint
    named |= _drawn(job)
    return {field: name for field, name in named.items() if name is not None and ":" in name}


def _drawn(job: JobSpec) -> dict[str, str | None]:
    """The entry points that the members of a population may have, by where they are listed."""
    found: dict[str, str | None] = {}
    for dimension in map(plain, job.search_space.dimensions if job.search_space else ()):
        if dimension.name.endswith(".entrypoint") and isinstance(dimension, Categorical | Ordinal):
            for place, name in enumerate(dimension.choices):
                found[f"search_space.{dimension.name}.choices[{place}]"] = str(name)
    return found

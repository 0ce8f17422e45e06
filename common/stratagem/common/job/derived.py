"""Derive values from a job: variants of it with other fields, and the user code that it names."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job.job import JobSpec
from stratagem.common.job.schedules import SettingSpec
from stratagem.common.job.search_space import Categorical, Ordinal, plain
from stratagem.common.schema.json import JSON, item_of, no_item, thawed
from stratagem.common.strategy import Federated, Local, PopulationBased, dump_strategy


def with_fields(job: JobSpec, values: Mapping[str, JSON]) -> JobSpec:
    """Return the job with fields such as "optimizer.lr" set; None takes a field away. An item of a
    list is found by its name, as in "optimizer.groups.head.lr", or by its place, as in
    "turns.0.params".

    Raises InvalidInputError if a path leads through a value or the job becomes invalid.
    """
    document = job.document()
    for path, value in values.items():
        *parents, last = path.split(".")
        place: dict[str, JSON] | list[JSON] = document
        for depth, key in enumerate(parents):
            if isinstance(place, list):
                at = item_of(place, key)
                if at is None:
                    text = f"{'.'.join(parents[:depth])} {no_item(place, key)}"
                    raise InvalidInputError.at(path, text)
                inner = place[at]
            else:
                inner = place.setdefault(key, {})
            if not isinstance(inner, dict | list):
                parent = ".".join(parents[: depth + 1])
                raise InvalidInputError.at(path, f"{parent!r} is a value and holds no fields")
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


def seed_of(name: str) -> int:
    """Return a seed, valid in torch, for a named part of a job; different names give independent
    seeds."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])


def member_job(job: JobSpec, member: int, params: Mapping[str, JSON]) -> JobSpec:
    """Return the job of one member of a population: the run's job with that member's
    hyperparameters and seed."""
    spec, per_generation = job.strategy, job.steps_per_generation or 1
    assert isinstance(spec, PopulationBased)
    inner = spec.options.inner or Local()
    total = spec.generations * per_generation
    fields: dict[str, JSON] = {
        "search_space": None,
        "steps_per_generation": None,
        "strategy": dump_strategy(inner),
        "seed": seed_of(f"member/{job.seed}/{member}"),
    }
    if isinstance(inner, Federated):
        fields["strategy"] = dump_strategy(replace(inner, rounds=total))
        fields["evaluation.every"] = f"{per_generation} rounds"
    else:
        fields["steps"] = total
        fields["evaluation.every"] = fields["checkpoint.every"] = f"{per_generation} steps"
    return with_fields(job, {**fields, **params})


def scheduled_job(job: JobSpec, setting: SettingSpec) -> JobSpec:
    """Return the job for one setting of a hyperparameter schedule: its values are set, the schedule
    is removed."""
    settings: dict[str, JSON] = {"hyperparameter_schedule": None, "seed": setting.seed}
    return with_fields(job, {**settings, **thawed(setting.params)})


def entry_points(job: JobSpec) -> tuple[str, ...]:
    """Return the entry points that the job names; workers may import no other user code for it."""
    return tuple(dict.fromkeys(entry_points_by_field(job).values()))


def entry_points_by_field(job: JobSpec) -> dict[str, str]:
    """Return the entry points that the job names, keyed by the path of the field with the name."""
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
        for grouped in optimizer.rules():
            field = f"{path}{grouped.path.removeprefix('optimizer')}.entrypoint"
            named[field] = grouped.rule.entrypoint
        if optimizer.schedule is not None:
            named[f"{path}.schedule.entrypoint"] = optimizer.schedule.entrypoint
    named |= _drawn(job)
    return {field: name for field, name in named.items() if name is not None and ":" in name}


def _drawn(job: JobSpec) -> dict[str, str | None]:
    """Return the entry points among the choices of a population's search space and in the settings
    of a hyperparameter schedule, keyed by the path of their list item."""
    names: dict[str, str | None] = {}
    schedule = job.hyperparameter_schedule
    for place, setting in enumerate(schedule.settings if schedule else ()):
        for path, value in setting.params.items():
            if path.endswith(".entrypoint"):
                names[f"hyperparameter_schedule.settings[{place}].params.{path}"] = str(value)
    for dimension in map(plain, job.search_space.dimensions if job.search_space else ()):
        if dimension.name.endswith(".entrypoint") and isinstance(dimension, Categorical | Ordinal):
            for place, name in enumerate(dimension.choices):
                names[f"search_space.{dimension.name}.choices[{place}]"] = str(name)
    return names

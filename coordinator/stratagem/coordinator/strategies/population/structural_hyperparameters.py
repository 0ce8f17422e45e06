"""Detection of the structural hyperparameters of a population.

They decide the layout of the state that members copy, or its optimizer, so a state cannot go on
under another value: a copy has its donor's, and exploring leaves it alone. Which optimizer it is
is structural by definition; a search space may say it of any; the rest is found where the models
are built, by building them with other values too. Pure: here stands only what is to be tried.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, assert_never

from stratagem.common.job import JobSpec
from stratagem.common.job.search_space import (
    Categorical,
    Conditional,
    Float,
    Int,
    Ordinal,
    Plain,
    SearchSpace,
    plain,
)
from stratagem.common.schema.json import JSON, thawed
from stratagem.coordinator.strategies.population.evolution import (
    Params,
    active_values,
    on_scale,
)

BY_DEFINITION: Final = frozenset({"optimizer.name", "optimizer.entrypoint"})
_CANNOT_BE: Final = ("optimizer.lr", "optimizer.clip_norm", "optimizer.schedule")
_MAY_BE: Final = ("model.kwargs.", "optimizer.")
_MAX_CHOICES: Final = 16
_MAX_INTEGERS: Final = 8
# Not the ends: a momentum of exactly 0 has no state, but is never drawn.
_SHARES: Final = (1 / 64, 63 / 64)


@dataclass(frozen=True, slots=True)
class Variant:
    """A member's job with another value of one hyperparameter."""

    name: str
    fields: Mapping[str, JSON]
    """What differs, by dotted path; None: the field is not there."""


def known_structure(space: SearchSpace) -> frozenset[str]:
    """Return the hyperparameters that are structural whatever the model is."""
    dimensions = map(plain, space.dimensions)
    named = (dim.name for dim in dimensions if dim.options.structural or dim.name in BY_DEFINITION)
    return with_parents(space, frozenset(named))


def with_parents(space: SearchSpace, names: frozenset[str]) -> frozenset[str]:
    """Return the names, and those that decide whether one of these is there at all."""
    by_name = {dimension.name: dimension for dimension in space.dimensions}
    closure = set(names)
    for dimension in space.dimensions:
        if plain(dimension).name in names:
            while isinstance(dimension, Conditional):
                dimension = by_name[dimension.parent]
                closure.add(plain(dimension).name)
    return frozenset(closure)


def variants(job: JobSpec, params: Params) -> Iterator[Variant]:
    """Yield the jobs to build in addition to a member with these hyperparameters, to find which are
    structural.

    job: of the population.
    """
    space = job.search_space
    assert space is not None
    document, decided = job.document(), known_structure(space)
    first = {plain(dim).name: next(values_of(plain(dim))) for dim in space.dimensions}
    for dimension in map(plain, space.in_order().dimensions):
        name = dimension.name
        if name in params and name not in decided and _may_be_structural(dimension):
            for value in values_of(dimension):
                if value != params[name]:
                    tried = active_values(space, {**first, **params, name: value})
                    fields = {field: thawed(tried[field]) for field in _changed(tried, params)}
                    left = (param for param in params if param not in tried)
                    yield Variant(name, fields | {field: _given(document, field) for field in left})


def _may_be_structural(dimension: Plain) -> bool:
    return (
        dimension.options.structural is None
        and dimension.name.startswith(_MAY_BE)
        and not dimension.name.startswith(_CANNOT_BE)
    )


def _changed(tried: Params, params: Params) -> Iterator[str]:
    return (name for name in tried if name not in params or tried[name] != params[name])


def _given(document: Mapping[str, JSON], path: str) -> JSON:
    """Return the job's own value at a dotted path; None where it has none."""
    *parents, last = path.split(".")
    place: JSON = dict(document)
    for key in parents:
        place = place.get(key) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        return None
    kwargs = place.get("kwargs")
    return place.get(last, kwargs.get(last) if isinstance(kwargs, dict) else None)


def values_of(dimension: Plain) -> Iterator[JSON]:
    """Yield some values that are as far apart as they can be."""
    match dimension:
        case Float(low=low, high=high, scale=scale):
            yield from (on_scale(low, high, scale, share) for share in _SHARES)
        case Int(low=low, high=high):
            yield from (low + at for at in spread(high - low + 1, _MAX_INTEGERS))
        case Categorical(choices=choices) | Ordinal(choices=choices):
            yield from (choices[at] for at in spread(len(choices), _MAX_CHOICES))
        case _:
            assert_never(dimension)


def spread(count: int, most: int) -> list[int]:
    """Return positions of a row of `count`, its two ends among them, and not more than `most`."""
    if count <= most:
        return list(range(count))
    return sorted({at * (count - 1) // (most - 1) for at in range(most)})

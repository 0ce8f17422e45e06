"""Evolve a population: decide which member copies which, and vary the copied hyperparameters.

Population based training is described in https://arxiv.org/abs/1711.09846. The functions are pure
functions over one snapshot of the scores (higher is better; None is invalid: missing, not finite,
or failed). Every member draws from a stream of its own, so the outcome depends neither on the
number of workers nor on timing.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import Final, assert_never

from stratagem.common.job import JobSpec
from stratagem.common.job.search_space import (
    Categorical,
    Conditional,
    Dimension,
    Float,
    Int,
    Ordinal,
    Plain,
    Scale,
    SearchSpace,
    plain,
)
from stratagem.common.schema.json import JSON, thawed
from stratagem.common.strategy import (
    Binary,
    ExploitStrategy,
    ExploreStrategy,
    Perturbation,
    Resample,
    Truncation,
)

# ---- Evolution ----

Params = Mapping[str, JSON]
Scores = Sequence[float | None]
Draw = Callable[[Plain], JSON]


def stream(seed: int, member: int, generation: int) -> Random:
    """Return the random generator of a member for a generation; generation 0 is for the first
    values."""
    key = hashlib.sha256(f"population/{seed}/{member}/{generation}".encode()).digest()
    return Random(int.from_bytes(key[:8]))


def donors(exploit: ExploitStrategy, scores: Scores, streams: Sequence[Random]) -> dict[int, int]:
    """Return the donor of each member that copies another one, keyed by member."""
    match exploit:
        case Truncation(fraction=fraction):
            return _truncation(scores, fraction, streams)
        case Binary(threshold=threshold):
            return _binary(scores, threshold, streams)
        case _:
            assert_never(exploit)


def _truncation(scores: Scores, fraction: float, streams: Sequence[Random]) -> dict[int, int]:
    """Return donors: the k worst and all invalid members each copy a random one of the k best."""
    num = len(scores)
    k = min(math.ceil(num * fraction - 1e-9), num // 2)
    ranked = sorted(range(num), key=lambda m: (rank(scores[m]), -m), reverse=True)
    best = [member for member in ranked[:k] if scores[member] is not None]
    if not best:
        return {}
    worst = [m for m in range(num) if m in ranked[num - k :] or scores[m] is None]
    return {member: streams[member].choice(best) for member in worst}


def _binary(scores: Scores, threshold: float, streams: Sequence[Random]) -> dict[int, int]:
    """Return donors: each member picks another one at random, and copies it if its score is better
    by more than the threshold."""
    copies = {}
    for member, score in enumerate(scores):
        others = [other for other in range(len(scores)) if other != member]
        if not others:
            continue
        drawn = streams[member].choice(others)
        theirs = scores[drawn]
        if theirs is not None and (score is None or theirs > score + threshold):
            copies[member] = drawn
    return copies


def rank(score: float | None) -> float:
    """Return a sort key of a score, by which an invalid score (None) is below all others."""
    return -math.inf if score is None else score


def explored(
    explore: ExploreStrategy,
    space: SearchSpace,
    params: Params,
    rng: Random,
    kept: Set[str] = frozenset(),
) -> dict[str, JSON]:
    """Return new values of copied hyperparameters, varied at random except for those in `kept`."""

    def value_of(dim: Plain) -> JSON:
        varied = _varied(explore, dim, params, rng)  # which takes its place in the stream
        return params[dim.name] if dim.name in kept and dim.name in params else varied

    return _assemble(space, value_of)


def _varied(explore: ExploreStrategy, dim: Plain, params: Params, rng: Random) -> JSON:
    match explore:
        case Resample():
            return _drawn(dim, rng)
        case Perturbation(factor=factor):
            return _perturbed(dim, params, factor, rng)
        case _:
            assert_never(explore)


def draw(space: SearchSpace, rng: Random) -> dict[str, JSON]:
    """Sample hyperparameters from the search space; a conditional one only if its parent allows
    it."""
    return _assemble(space, lambda dimension: _drawn(dimension, rng))


def _assemble(space: SearchSpace, value_of: Draw) -> dict[str, JSON]:
    """Return one value per active hyperparameter; values of all dimensions are asked for in order,
    so that each has its own place in the random stream."""
    return active_values(
        space, {_name(dimension): value_of(plain(dimension)) for dimension in space.dimensions}
    )


def active_values(space: SearchSpace, values: Params) -> dict[str, JSON]:
    """Return the frozen values, and the given values (one per dimension) whose conditions are
    met."""
    conditions = {
        dimension.name: dimension
        for dimension in space.dimensions
        if isinstance(dimension, Conditional)
    }

    def is_active(name: str) -> bool:
        condition = conditions.get(name)
        if condition is None:
            return True
        parent = conditions.get(condition.parent)
        parent_name = _name(parent) if parent else condition.parent
        return is_active(condition.parent) and values[parent_name] in condition.parent_values

    active = {
        _name(dimension): values[_name(dimension)]
        for dimension in space.dimensions
        if is_active(dimension.name)
    }
    return {**space.frozen, **active}


def _name(dimension: Dimension) -> str:
    """Return the name of the hyperparameter that a dimension of the search space sets."""
    return plain(dimension).name


def _drawn(dimension: Plain, rng: Random) -> JSON:
    match dimension:
        case Float(low=low, high=high, scale=scale):
            return on_scale(low, high, scale, rng.random())
        case Int(low=low, high=high, scale=Scale.LINEAR):
            return rng.randint(low, high)
        case Int(low=low, high=high, scale=scale):
            return min(max(round(on_scale(low, high, scale, rng.random())), low), high)
        case Categorical(choices=choices) | Ordinal(choices=choices):
            return choices[rng.randrange(len(choices))]
        case _:
            assert_never(dimension)


def on_scale(low: float, high: float, scale: Scale, share: float) -> float:
    """Return the point at a fraction (`share`) of the way from low to high, measured on a scale."""
    match scale:
        case Scale.LINEAR:
            value = low + (high - low) * share
        case Scale.LOG:
            value = low * (high / low) ** share
        case Scale.REVERSE_LOG:
            value = high + low - low * (high / low) ** (1 - share)
        case _:
            assert_never(scale)
    return min(max(value, low), high)


def _perturbed(dimension: Plain, params: Params, factor: float, rng: Random) -> JSON:
    drawn = rng.random()
    if dimension.name not in params:  # its condition was not met so far
        return _drawn(dimension, rng)
    value = params[dimension.name]
    times = 1 - factor + 2 * factor * drawn
    match dimension:
        case Float(low=low, high=high):
            assert isinstance(value, int | float)
            return min(max(value * times, low), high)
        case Int(low=low, high=high):
            assert isinstance(value, int)
            moved = round(value * times)
            if moved == value and value * times != value:
                moved += 1 if value * times > value else -1
            return min(max(moved, low), high)
        case Ordinal(choices=choices):
            index = choices.index(value)
            neighbours = [i for i in (index - 1, index + 1) if 0 <= i < len(choices)]
            at = int(drawn * len(neighbours))
            return choices[neighbours[at]] if neighbours else value
        case Categorical():
            return value
        case _:
            assert_never(dimension)


# ---- Structural hyperparameters ----
#
# A structural hyperparameter decides the layout of the state that members copy, or its optimizer,
# so a state cannot continue under another value. A copy takes the value of its donor, and
# exploring leaves it unchanged.
#
# The choice of the optimizer is structural by definition, and a search space may declare any
# hyperparameter structural. The rest is found where the models are built, by building them with
# other values too. This code is pure and determines only which values to try.

BY_DEFINITION: Final = frozenset({"optimizer.name", "optimizer.entrypoint"})
_CANNOT_BE: Final = ("optimizer.lr", "optimizer.clip_norm", "optimizer.schedule")
_MAY_BE: Final = ("model.kwargs.", "optimizer.")
_MAX_CHOICES: Final = 16
_MAX_INTEGERS: Final = 8
# Not the ends: a momentum of exactly 0 has no state, but is never drawn.
_SHARES: Final = (1 / 64, 63 / 64)


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a member's job, in which one hyperparameter has another value."""

    name: str
    fields: Mapping[str, JSON]
    """The fields that differ, keyed by dotted path; None: the field is absent."""


def known_structure(space: SearchSpace) -> frozenset[str]:
    """Return the hyperparameters that are structural for any model."""
    dimensions = map(plain, space.dimensions)
    named = (dim.name for dim in dimensions if dim.options.structural or dim.name in BY_DEFINITION)
    return with_parents(space, frozenset(named))


def with_parents(space: SearchSpace, names: frozenset[str]) -> frozenset[str]:
    """Return the names of these hyperparameters and of the parents that make them active or not."""
    by_name = {dimension.name: dimension for dimension in space.dimensions}
    closure = set(names)
    for dimension in space.dimensions:
        if plain(dimension).name in names:
            while isinstance(dimension, Conditional):
                dimension = by_name[dimension.parent]
                closure.add(plain(dimension).name)
    return frozenset(closure)


def variants(job: JobSpec, params: Params) -> Iterator[Variant]:
    """Yield the variants to build, besides a member with these hyperparameters, to find out which
    ones are structural.

    job: the job of the population.
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
                    rest = (param for param in params if param not in tried)
                    yield Variant(name, fields | {field: _given(document, field) for field in rest})


def _may_be_structural(dimension: Plain) -> bool:
    return (
        dimension.options.structural is None
        and dimension.name.startswith(_MAY_BE)
        and not dimension.name.startswith(_CANNOT_BE)
    )


def _changed(tried: Params, params: Params) -> Iterator[str]:
    return (name for name in tried if name not in params or tried[name] != params[name])


def _given(document: Mapping[str, JSON], path: str) -> JSON:
    """Return the value that the job itself gives at a dotted path; None if it has none."""
    *parents, last = path.split(".")
    place: JSON = dict(document)
    for key in parents:
        place = place.get(key) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        return None
    kwargs = place.get("kwargs")
    return place.get(last, kwargs.get(last) if isinstance(kwargs, dict) else None)


def values_of(dimension: Plain) -> Iterator[JSON]:
    """Yield some values of a dimension that are as far apart as possible."""
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
    """Return at most `most` indexes of `count` items, evenly spread, both ends included."""
    if count <= most:
        return list(range(count))
    return sorted({at * (count - 1) // (most - 1) for at in range(most)})

"""The evolution of a population: which member copies which, and how copied values are varied.

Population based training, https://arxiv.org/abs/1711.09846. Pure functions over one snapshot of
the scores (higher is better, None is invalid: missing, not finite, or failed). Every member draws
from a stream of its own, so the outcome depends neither on the number of workers nor on timing.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence, Set
from random import Random
from typing import assert_never

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
from stratagem.common.schema.json import JSON
from stratagem.common.strategy import (
    Binary,
    ExploitStrategy,
    ExploreStrategy,
    Perturbation,
    Resample,
    Truncation,
)

Params = Mapping[str, JSON]
Scores = Sequence[float | None]
Draw = Callable[[Plain], JSON]


def stream(seed: int, member: int, generation: int) -> Random:
    """Return the random numbers of one member in one generation; generation 0 draws the first
    values."""
    key = hashlib.sha256(f"population/{seed}/{member}/{generation}".encode()).digest()
    return Random(int.from_bytes(key[:8]))


def donors(exploit: ExploitStrategy, scores: Scores, streams: Sequence[Random]) -> dict[int, int]:
    """Return member -> the member that it copies, for those that copy."""
    match exploit:
        case Truncation(fraction=fraction):
            return _truncation(scores, fraction, streams)
        case Binary(threshold=threshold):
            return _binary(scores, threshold, streams)
        case _:
            assert_never(exploit)


def _truncation(scores: Scores, fraction: float, streams: Sequence[Random]) -> dict[int, int]:
    """Each of the k worst, and each invalid one, copies a uniformly drawn one of the k best."""
    num = len(scores)
    k = min(math.ceil(num * fraction - 1e-9), num // 2)
    ranked = sorted(range(num), key=lambda m: (rank(scores[m]), -m), reverse=True)
    best = [member for member in ranked[:k] if scores[member] is not None]
    if not best:
        return {}
    worst = [m for m in range(num) if m in ranked[num - k :] or scores[m] is None]
    return {member: streams[member].choice(best) for member in worst}


def _binary(scores: Scores, threshold: float, streams: Sequence[Random]) -> dict[int, int]:
    """Each member draws another one and copies it when it is better by more than the threshold."""
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
    """Return the place of a score in an order: an invalid one is below all others."""
    return -math.inf if score is None else score


def explored(
    explore: ExploreStrategy,
    space: SearchSpace,
    params: Params,
    rng: Random,
    kept: Set[str] = frozenset(),
) -> dict[str, JSON]:
    """Return copied hyperparameters, varied but for those that are kept."""

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
    """Draw hyperparameters from the search space; a conditional one only where its parent allows
    it."""
    return _assemble(space, lambda dimension: _drawn(dimension, rng))


def _assemble(space: SearchSpace, value_of: Draw) -> dict[str, JSON]:
    """Ask for a value of every dimension, in order, so that each has its own place in the
    stream."""
    return active_values(
        space, {_name(dimension): value_of(plain(dimension)) for dimension in space.dimensions}
    )


def active_values(space: SearchSpace, values: Params) -> dict[str, JSON]:
    """Return, from one value for each dimension, those whose conditions are met, and what is
    frozen."""
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
    """Return the hyperparameter that a dimension sets."""
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
    """Return the point a share of the way from low to high."""
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

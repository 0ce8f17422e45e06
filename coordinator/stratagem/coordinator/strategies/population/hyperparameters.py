"""Checks of which fields of a job a population may vary.

A member copies a state and hyperparameters; afterwards it continues from that state with other
hyperparameters. So a field can be varied where the state does not depend on it.
"""

from collections.abc import Iterator
from typing import assert_never

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.job import JobSpec, check_optimizer, member_job
from stratagem.common.job.search_space import (
    Categorical,
    Conditional,
    Dimension,
    Float,
    Int,
    Ordinal,
    Plain,
    SearchSpace,
    plain,
)
from stratagem.common.schema.json import JSON
from stratagem.coordinator.strategies.population.evolution import (
    Params,
    active_values,
    draw,
    stream,
)
from stratagem.coordinator.strategies.population.population_run import space_of
from stratagem.coordinator.strategies.population.structural_hyperparameters import (
    BY_DEFINITION,
    spread,
    values_of,
)

_PREFIXES = ("optimizer.", "loss.kwargs.", "model.kwargs.")
_PHASES = "phases."
_OPTIMIZER = "optimizer.name"
_MAX_CHOICES = 64
_OF_PHASES = (
    "correct_every",
    "trust",
    "max_relative_error",
    "min_correlation",
    "correction_weight",
    "predictor.decay",
    "predictor.damping",
    "predictor.momentum",
    "adaptive.loss_threshold",
)
_LENGTHS = "the lengths of the phases belong to the state that is copied, and adaptation moves them"
_HISTORY = "the gradients that a copied state remembers are those of its predictor"
_WHY_NOT = {
    "full_steps": _LENGTHS,
    "predict_steps": _LENGTHS,
    "warmup_steps": "only the first cycle of a run has a warm-up, and a copied state is behind it",
    "predictor.kind": _HISTORY,
    "predictor.history": _HISTORY,
}


def check_params(job: JobSpec) -> list[Violation]:
    """Return the violations of a search space: every hyperparameter must be a field of the job that
    can be varied."""
    space = space_of(job)
    names = [plain(dimension).name for dimension in space.dimensions]
    violations = [
        violation
        for name in (*names, *space.frozen)
        for violation in check_name(job, name, "search_space")
    ]
    if violations:
        return violations
    for dim in map(plain, space.dimensions):
        if dim.name in BY_DEFINITION and dim.options.structural is False:
            text = "must not be false: it decides what the optimizer keeps"
            return [Violation(f"search_space.{dim.name}.structural", text)]
    violations = [
        violation for dimension in space.dimensions for violation in _check_values(job, dimension)
    ]
    return violations or [
        optimizer for at in space.dimensions for optimizer in _check_optimizers(job, at)
    ]


def check_name(job: JobSpec, name: str, section: str) -> Iterator[Violation]:
    """Yield why a field of the job cannot be another one for a state that goes on."""
    where = f"{section}.{name}"
    if name.startswith(_PREFIXES) or _is_of_a_turn(job, name):
        return
    if not name.startswith(_PHASES):
        text = f"is not a hyperparameter; those start with {', '.join(_PREFIXES)}, {_PHASES}"
        yield Violation(where, text)
    elif name.removeprefix(_PHASES) not in _OF_PHASES:
        reason = _WHY_NOT.get(name.removeprefix(_PHASES), "it has no meaning by itself")
        allowed = ", ".join(f"{_PHASES}{phase}" for phase in _OF_PHASES)
        yield Violation(where, f"cannot be varied: {reason}; {allowed} can")
    elif job.phases is None:
        yield Violation(where, "the job has no phases; add that section, empty for its defaults")


def _is_of_a_turn(job: JobSpec, name: str) -> bool:
    """Return whether a name is that of a number of a turn's optimizer."""
    paths = tuple(f"turns.{turn.name}.optimizer." for turn in job.turns or ())
    kinds = (".optimizer.name", ".optimizer.entrypoint")
    return name.startswith(paths) and not name.endswith(kinds)


def _check_values(job: JobSpec, dimension: Dimension) -> list[Violation]:
    """Return a violation for an end of a range, or a choice, that a member cannot have."""
    space, name = space_of(job), plain(dimension).name
    needed = _conditions(space, dimension)
    others = draw(space, stream(job.seed, 0, 0))
    first = {plain(dim).name: next(values_of(plain(dim))) for dim in space.dimensions}
    for value in _extremes(plain(dimension)):
        alone = {**space.frozen, **needed, name: value}
        # It may need values of other dimensions.
        together = active_values(space, {**first, **others, **needed, name: value})
        why = _why_not(job, alone)
        if why and _why_not(job, together):
            return [Violation(f"search_space.{name}", why)]
    return []


def _check_optimizers(job: JobSpec, dimension: Dimension) -> Iterator[Violation]:
    """Refuse a keyword that is drawn together with an optimizer which does not take it."""
    space, name = space_of(job), plain(dimension).name
    chosen = next((dim for dim in space.dimensions if plain(dim).name == _OPTIMIZER), None)
    if chosen is None or name == _OPTIMIZER or not name.startswith("optimizer."):
        return
    first = {plain(dim).name: next(values_of(plain(dim))) for dim in space.dimensions}
    needed = {**_conditions(space, chosen), **_conditions(space, dimension)}
    for optimizer in _extremes(plain(chosen)):
        params = active_values(space, {**first, **needed, _OPTIMIZER: optimizer})
        if name in params and (why := _unknown(job, params, name)):
            text = f"{why}; draw it where it is taken: when: {{{_OPTIMIZER}: [...]}}"
            yield Violation(f"search_space.{name}", text)
            return


def _unknown(job: JobSpec, params: Params, name: str) -> str:
    """Return why the optimizer of a member does not take this keyword; "" when it does, and where
    what is drawn with it makes no valid job."""
    try:
        optimizer = member_job(job, 0, params).optimizer
    except InvalidInputError:
        return ""
    assert optimizer is not None  # a member trains
    field = f"optimizer.{name.rpartition('.')[2]}"
    return next(
        (violation.message for violation in check_optimizer(optimizer) if violation.field == field),
        "",
    )


def _conditions(space: SearchSpace, dimension: Dimension) -> dict[str, JSON]:
    """Return values of other dimensions under which the dimension is active."""
    by_name = {dim.name: dim for dim in space.dimensions}
    conditions: dict[str, JSON] = {}
    while isinstance(dimension, Conditional):
        parent = by_name[dimension.parent]
        conditions[plain(parent).name] = dimension.parent_values[0]
        dimension = parent
    return conditions


def _extremes(dimension: Plain) -> list[JSON]:
    match dimension:
        case Categorical(choices=choices) | Ordinal(choices=choices):
            return [choices[at] for at in spread(len(choices), _MAX_CHOICES)]
        case Float(low=low, high=high) | Int(low=low, high=high):
            return [low, high]
        case _:
            assert_never(dimension)


def _why_not(job: JobSpec, params: Params) -> str:
    """Return why a member cannot have these hyperparameters; "" when it can."""
    try:
        optimizer = member_job(job, 0, params).optimizer
    except InvalidInputError as error:
        return "; ".join(violation.message for violation in error.violations) or str(error)
    if optimizer is None:
        return ""
    if optimizer.plateau is not None:
        return "plateau is not allowed in a population, whose members copy each other's states"
    return "; ".join(violation.message for violation in check_optimizer(optimizer))

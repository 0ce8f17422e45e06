"""Which fields of a job a population may vary.

What a member copies is a state and hyperparameters; afterwards it goes on from that state with
other hyperparameters. So a field can be varied where the state does not depend on it.
"""

from collections.abc import Iterator

from stratagem.common.errors import InvalidInputError, Violation
from stratagem.common.job import JobSpec, with_fields
from stratagem.common.json_text import JSON
from stratagem.common.search_space import Categorical, Float, Int, Ordinal
from stratagem.coordinator.strategies.evolution import Plain, draw, plain, stream
from stratagem.coordinator.strategies.population_run import member_job, space_of
from stratagem.coordinator.strategies.structure import BY_DEFINITION

_PREFIXES = ("optimizer.", "loss.kwargs.", "model.kwargs.")
_PHASES = "phases."
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
    """Every hyperparameter must be a field of the job that can be varied."""
    space = space_of(job)
    names = [plain(each).name for each in space.dimensions]
    found = [each for name in (*names, *space.frozen) for each in _check_name(job, name)]
    if found:
        return found
    for each in map(plain, space.dimensions):
        if each.name in BY_DEFINITION and each.options.structural is False:
            text = "must not be false: it decides what the optimizer keeps"
            return [Violation(f"search_space.{each.name}.structural", text)]
    drawn = draw(space, stream(job.seed, 0, 0))
    first = {name: value for name, value in drawn.items() if not name.startswith(_PHASES)}
    return [
        violation
        for dimension in map(plain, space.dimensions)
        if dimension.name.startswith(_PHASES)
        for violation in _check_values(job, first, dimension)
    ]


def _check_name(job: JobSpec, name: str) -> Iterator[Violation]:
    where = f"search_space.{name}"
    if name.startswith(_PREFIXES):
        return
    if not name.startswith(_PHASES):
        text = f"is not a hyperparameter; those start with {', '.join(_PREFIXES)}, {_PHASES}"
        yield Violation(where, text)
    elif name.removeprefix(_PHASES) not in _OF_PHASES:
        reason = _WHY_NOT.get(name.removeprefix(_PHASES), "it has no meaning by itself")
        allowed = ", ".join(f"{_PHASES}{each}" for each in _OF_PHASES)
        yield Violation(where, f"cannot be varied: {reason}; {allowed} can")
    elif job.phases is None:
        yield Violation(where, "the job has no phases; add that section, empty for its defaults")


def _check_values(job: JobSpec, first: dict[str, JSON], dimension: Plain) -> list[Violation]:
    """What is wrong with the ends of a range, or with a choice."""
    values: tuple[JSON, ...]
    match dimension:
        case Categorical(choices=values) | Ordinal(choices=values):
            pass
        case Float(low=low, high=high) | Int(low=low, high=high):
            values = (low, high)
    own = member_job(job, 0, first)
    for value in values:
        try:
            with_fields(own, {dimension.name: value})
        except InvalidInputError as error:
            text = "; ".join(each.message for each in error.violations) or str(error)
            return [Violation(f"search_space.{dimension.name}", text)]
    return []

"""Check that a user's optimizer continues from its saved state exactly as if it had never stopped.

It is tried on a few small parameters when a model is built: steps, a save, a load into a fresh
optimizer, and more steps of both. What an optimizer keeps outside of `state`, or draws, shows as a
difference. The module knows neither trainers nor their state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, OptimizerSpec
from stratagem.common.job.optimizer import GroupedRule
from stratagem.worker.engine.apply_step import set_learning_rates
from stratagem.worker.engine.optimizers import NamedParams, make_part, update
from stratagem.worker.engine.state_format import load_optimizer_state, optimizer_state
from stratagem.worker.engine.turns import by_turn
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

_STEPS_BEFORE: Final = 2
_STEPS_AFTER: Final = 6
_LENGTH: Final = 4
"""Largest side length of a test parameter."""
_PER_SHAPE: Final = 2
"""Number of test parameters per group and number of dimensions: two, since they may share state."""


def check_optimizer_of(job: JobSpec, model: nn.Module, entrypoints: EntryPoints) -> None:
    """Raise InvalidInputError if the job uses a user's optimizer that does not continue correctly
    from a saved state."""
    if not job.only_evaluates:
        params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for turn, turn_params in by_turn(job.turns or (), params):
            check_round_trip(turn.optimizer, turn_params, entrypoints)
        if job.turns is None:
            check_round_trip(job.optimizer, params, entrypoints)


def check_round_trip(spec: OptimizerSpec, params: NamedParams, entrypoints: EntryPoints) -> None:
    """Raise InvalidInputError for a user's optimizer that does not continue correctly from a saved
    state. params: the trained parameters, on any device; their values are not used."""
    for part, members in _own_of(spec, params):
        with torch.random.fork_rng(devices=[]), user_code("trying the optimizer"):
            why = _why_not(_Trial(part, members, entrypoints))
        if why:
            text = f'"{part.rule.label}" does not go on from its saved state: {why}'
            raise InvalidInputError.at(f"{part.path}.entrypoint", text)


def check_alone(spec: OptimizerSpec, params: NamedParams, entrypoints: EntryPoints) -> None:
    """Raise InvalidInputError for a user's optimizer that mixes the gradients of several
    parameters, in a job whose processes each hold only some of the parameters."""
    for part, members in _own_of(spec, params):
        trial = _Trial(part, members, entrypoints)
        together, alone = trial.probes(), trial.probes()
        with torch.random.fork_rng(devices=[]), user_code("trying the optimizer"):
            _train(trial.optimizer_of(together), together, 0, _STEPS_BEFORE)
            for at, probe in enumerate(alone):
                _train(trial.optimizer_of([probe]), [probe], 0, _STEPS_BEFORE, first=at)
        if name := _unequal(together, alone):
            text = (
                f'"{part.rule.label}" updates {name!r} by the gradients of other parameters, too, '
                "and the stages of a pipeline have only their own; use another strategy than "
                "ModelParallel"
            )
            raise InvalidInputError.at(f"{part.path}.entrypoint", text)


def _own_of(
    spec: OptimizerSpec, params: NamedParams
) -> Iterator[tuple[GroupedRule, dict[str, NamedParams]]]:
    """Yield each user's optimizer of the job, with a few parameters for each of its groups and each
    number of dimensions."""
    by_group: dict[str, dict[int, list[tuple[str, nn.Parameter]]]] = {}
    for name, param in params:
        same = by_group.setdefault(spec.group_of(name, param.dim()), {}).setdefault(param.dim(), [])
        if len(same) < _PER_SHAPE:
            same.append((name, param))
    for part in spec.rules():
        members: dict[str, NamedParams] = {
            name: [pair for same in by_group[name].values() for pair in same]
            for name in part.groups
            if name in by_group
        }
        if part.rule.name is None and members:
            yield part, members


@dataclass(frozen=True, slots=True)
class _Trial:
    """A user's optimizer under test, with some parameters for each of its groups."""

    each: GroupedRule
    members: Mapping[str, NamedParams]
    entrypoints: EntryPoints

    def probes(self) -> list[tuple[str, nn.Parameter]]:
        """Return small parameters on the CPU that stand in for the model's."""
        generator = torch.Generator().manual_seed(0)
        probes = []
        for name, param in (pair for pairs in self.members.values() for pair in pairs):
            shape = [min(side, _LENGTH) for side in param.shape]
            values = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
            probes.append((name, nn.Parameter(values.to(param.dtype))))
        return probes

    def optimizer_of(self, probes: NamedParams) -> torch.optim.Optimizer:
        """Make a new optimizer over these stand-in parameters, each in its group."""
        by_name = dict(probes)
        members = {
            group: [(name, by_name[name]) for name, _ in pairs if name in by_name]
            for group, pairs in self.members.items()
        }
        held = {group: pairs for group, pairs in members.items() if pairs}
        return make_part(self.each, held, entrypoints=self.entrypoints)


def _why_not(trial: _Trial) -> str:
    """Return a description of what differs after a save and a load; "" if nothing does."""
    originals, copied = trial.probes(), trial.probes()
    old = trial.optimizer_of(originals)
    _train(old, originals, 0, _STEPS_BEFORE)
    tensors, numbers = optimizer_state(old, originals)
    if strange := [key for key in old.state if not any(key is param for _, param in originals)]:
        return f"optimizer.state has {strange[0]!r}, which is no parameter"
    other = trial.optimizer_of(copied)
    with torch.no_grad():
        for (_, source), (_, target) in zip(originals, copied, strict=True):
            target.copy_(source)
    load_optimizer_state(other, copied, tensors, numbers)
    set_learning_rates(other, _rate(_STEPS_BEFORE - 1))
    for number, (group, twin) in enumerate(zip(old.param_groups, other.param_groups, strict=True)):
        if key := _differing(group, twin):
            return _difference(f"param_groups[{number}][{key!r}]", group[key], twin.get(key))
    # A whole number is a count; others may be what a step leaves behind for the next to overwrite.
    counts = {key: value for key, value in vars(old).items() if isinstance(value, int)}
    count, left_behind = _differing(counts, vars(other)), _differing(vars(old), vars(other))
    changes = [
        _difference(f"its attribute {key!r}", getattr(old, key), getattr(other, key, None))
        for key in (count, left_behind)
        if key
    ]
    if count:
        return changes[0]
    _train(old, originals, _STEPS_BEFORE, _STEPS_AFTER)
    _train(other, copied, _STEPS_BEFORE, _STEPS_AFTER)
    name = _unequal(originals, copied)
    kinds = "it keeps something outside of optimizer.state[parameter], or draws random numbers"
    return name and "; ".join([f"its next steps update {name!r} otherwise", *(changes or [kinds])])


def _difference(what: str, mine: object, theirs: object) -> str:
    text = f"{what} was {mine!r} and is {theirs!r}"
    return f"{text}; what changes belongs into optimizer.state[parameter]"


def _train(
    optimizer: torch.optim.Optimizer,
    params: NamedParams,
    begin: int,
    num_steps: int,
    *,
    first: int = 0,
) -> None:
    """Train with gradients that depend on the step and the parameter's index, and a learning rate
    that changes each step. first: the index of the first parameter."""
    for step in range(begin, begin + num_steps):
        for number, (_, param) in enumerate(params, first):
            generator = torch.Generator().manual_seed(1000 * step + number)
            grad = torch.randn(param.shape, dtype=torch.float64, generator=generator, device="cpu")
            param.grad = grad.to(param.dtype)
        set_learning_rates(optimizer, _rate(step))
        update(optimizer)


def _rate(step: int) -> float:
    return 1.0 / (1 + step)


def _differing(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    """Return the name of the first number or tensor that differs; "" if none does."""
    return next((key for key, value in mine.items() if not _same(value, theirs.get(key))), "")


def _same(mine: object, theirs: object) -> bool:
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    if isinstance(mine, int | float | str):
        return mine == theirs or (mine != mine and theirs != theirs)  # not a number
    return True


def _unequal(mine: NamedParams, theirs: NamedParams) -> str:
    """Return the name of the first parameter whose bits differ; "" if none does."""
    pairs: Iterator[tuple[tuple[str, nn.Parameter], tuple[str, nn.Parameter]]]
    pairs = zip(mine, theirs, strict=True)
    return next((name for (name, one), (_, other) in pairs if not torch.equal(one, other)), "")

"""Run a user's learning-rate schedule, such as torch's OneCycleLR, on an optimizer without tensors.

After each applied step its values (learning rate, momentum, betas) go to the groups of the real
optimizer that have the same names, wherever those are. What is saved is JSON: a schedule that was
made from other values, by a population or for a longer training, is stepped again from its start.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import OptimizerSpec
from stratagem.common.job.optimizer import DEFAULT_GROUP
from stratagem.common.schema.json import dump_json
from stratagem.worker.engine.optimizers import GROUP, make_part
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

METADATA: Final = "schedule"
"""Key of the schedule's state in a state's metadata."""
_FIELD: Final = "optimizer.schedule.entrypoint"
_ACTIVITY: Final = "the schedule"
_NOT_COPIED: Final = frozenset({"params", "initial_lr", GROUP})
_STEPS_TRIED: Final = 4


class ShadowSchedule:
    """A user's scheduler on an optimizer without tensors, whose values the real optimizer copies.
    Used by one thread."""

    def __init__(self, spec: OptimizerSpec, num_steps: int, entrypoints: EntryPoints) -> None:
        self._spec, self._num_steps, self._entrypoints = spec, num_steps, entrypoints
        document = {**spec.document(), "clip_norm": None, "num_steps": num_steps}
        self._made_of = hashlib.sha256(dump_json(document).encode()).hexdigest()[:16]
        self._num_applied = 0
        self._running = self._begin()
        self._try()

    def set_values(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the values for the next step into the optimizer's groups."""
        values = self._running.values_after(self._num_applied)
        for group in optimizer.param_groups:
            if group.get(GROUP) not in values:
                text = "needs groups of the job's; the optimizer's entry point has made its own"
                raise InvalidInputError.at(_FIELD, text)
            for key, value in values[group[GROUP]].items():
                if key in group and key not in _NOT_COPIED and _is_numbers(value):
                    group[key] = value

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each group for the next step, keyed by group name."""
        values = self._running.values_after(self._num_applied)
        return {name: float(of_group["lr"]) for name, of_group in values.items()}

    def step(self) -> None:
        """Advance the schedule by one applied step."""
        self._num_applied += 1

    def metadata(self) -> dict[str, str]:
        """Return the metadata needed to continue; empty before the first step."""
        if not self._num_applied:
            return {}
        state = {"made_of": self._made_of, "applied": self._num_applied, **self._running.state()}
        return {METADATA: json.dumps(state)}

    def load(self, metadata: Mapping[str, str], step: int) -> None:
        """Continue from the result of `metadata`. step: number of applied steps, used if the state
        has no schedule."""
        saved = json.loads(metadata.get(METADATA, "{}"))
        self._num_applied, self._running = int(saved.get("applied", step)), self._begin()
        if saved.get("made_of") == self._made_of:
            self._running.load(saved)

    def _begin(self) -> "_Running":
        schedule = self._spec.schedule
        assert schedule is not None
        name = str(schedule.entrypoint)
        make = self._entrypoints.bind(name, schedule.kwargs or {}, "optimizer.schedule")
        shadow = _shadow_of(self._spec, self._entrypoints)
        with user_code(f"making {_ACTIVITY}"):
            scheduler = make(shadow, self._num_steps)
        lacks = [
            method
            for method in ("step", "state_dict", "load_state_dict")
            if not callable(getattr(scheduler, method, None))
        ]
        if lacks:
            text = f'"{name}" returned a {type(scheduler).__name__}, which has no {lacks[0]}()'
            raise InvalidInputError.at(_FIELD, text)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            text = f'"{name}" follows an evaluation, and a schedule only the steps'
            raise InvalidInputError.at(_FIELD, text)
        return _Running(name, shadow, scheduler)

    def _try(self) -> None:
        """Raise InvalidInputError if the schedule does not continue from its saved state."""
        before, after = self._begin(), self._begin()
        middle = min(_STEPS_TRIED, self._num_steps - 1)
        before.values_after(middle)
        after.load(json.loads(json.dumps(before.state())))
        for num_steps in range(middle, min(2 * _STEPS_TRIED, self._num_steps)):
            if before.values_after(num_steps) != after.values_after(num_steps):
                text = f'"{before.name}" has other values after its state is saved and loaded'
                raise InvalidInputError.at(_FIELD, text)


@dataclass(slots=True)
class _Running:
    """A scheduler and the optimizer that it changes."""

    name: str
    shadow: "_Shadow"
    scheduler: Any
    position: int = 0
    """Number of steps that the scheduler has made."""

    def values_after(self, num_steps: int) -> dict[str, dict[str, Any]]:
        """Return the values of each group after `num_steps` steps, keyed by group name.

        The scheduler is stepped no further, since some raise when stepped beyond their end.
        """
        if self.position < num_steps:
            with user_code(_ACTIVITY):
                self.shadow.step()  # torch warns if this was never called
                for _ in range(num_steps - self.position):
                    self.scheduler.step()
            self.position = num_steps
        return {
            group[GROUP]: {key: value for key, value in group.items() if key not in _NOT_COPIED}
            for group in self.shadow.param_groups
        }

    def state(self) -> dict[str, Any]:
        with user_code(_ACTIVITY):
            scheduler_state = self.scheduler.state_dict()
        groups = [_without_params(group) for group in self.shadow.param_groups]
        return {
            "position": self.position,
            "scheduler": _encoded(scheduler_state, self.name, "state_dict()"),
            "groups": _encoded(groups, self.name, "param_groups"),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        for group, saved in zip(self.shadow.param_groups, _decoded(state["groups"]), strict=True):
            group.update(saved)
        with user_code(_ACTIVITY):
            self.shadow.step()
            self.scheduler.load_state_dict(_decoded(state["scheduler"]))
        self.position = state["position"]


class _Shadow(torch.optim.Optimizer):
    """An optimizer with parameter groups that updates nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing, since there are no values to update."""


def _shadow_of(spec: OptimizerSpec, entrypoints: EntryPoints) -> _Shadow:
    """Make a shadow optimizer with the job's groups, `default` first, each with one empty
    parameter."""
    groups: dict[str, dict[str, Any]] = {}
    defaults: dict[str, Any] = {}
    for part in spec.rules():
        members = {name: [(name, nn.Parameter(torch.zeros(1, 1)))] for name in part.groups}
        made = make_part(part, members, entrypoints=entrypoints)
        defaults = defaults or made.defaults
        groups |= {str(group.get(GROUP)): group for group in made.param_groups}
    names = [DEFAULT_GROUP, *(group.name for group in spec.groups or ())]
    if missing := [name for name in names if name not in groups]:
        text = f"needs groups of the job's; the optimizer's entry point has none for {missing[0]!r}"
        raise InvalidInputError.at(_FIELD, text)
    empty = [{**groups[name], "params": [nn.Parameter(torch.zeros(0))]} for name in names]
    for group in empty:
        del group["initial_lr"]
    shadow = _Shadow(empty, {})  # with defaults it would give groups values that they do not have
    shadow.defaults = defaults
    return shadow


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_numbers(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_numbers(item) for item in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _encoded(value: object, name: str, where: str) -> Any:
    """Encode a value as JSON that `_decoded` reads back exactly; raises InvalidInputError for other
    than plain values."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_encoded(item, name, f"{where}[{i}]") for i, item in enumerate(value)]
        case tuple():
            return {"tuple": _encoded(list(value), name, where)}
        case Counter():
            return {"counter": [*_pairs(value, name, where)]}
        case dict():
            return {"dict": [*_pairs(value, name, where)]}
        case _:
            kind = f"{where} is a {type(value).__name__}"
            text = f'"{name}" cannot be saved: {kind}; it may keep numbers, texts, lists and dicts'
            raise InvalidInputError.at(_FIELD, text)


def _pairs(value: Mapping[Any, Any], name: str, where: str) -> Iterator[list[Any]]:
    for key, item in value.items():
        at = f"{where}[{key!r}]"
        yield [_encoded(key, name, at), _encoded(item, name, at)]


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    items = _decoded(inside)
    if kind == "tuple":
        return tuple(items)
    return Counter(dict(items)) if kind == "counter" else dict(items)


def shadow_schedule(
    spec: OptimizerSpec, num_steps: int, entrypoints: EntryPoints
) -> ShadowSchedule | None:
    """Make the user's learning-rate schedule that a job names; return None if it names none."""
    if spec.schedule is None or spec.schedule.entrypoint is None:
        return None
    return ShadowSchedule(spec, num_steps, entrypoints)

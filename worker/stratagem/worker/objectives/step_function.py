"""A step function is an objective that the user defines, as a function of model and batch.

It returns the mean loss, (mean, weight), or {"loss", "weight", "log": {name: (mean, weight)}}. It
must not run backward or update parameters: gradients that it leaves, and parameters that it writes,
would be counted twice or not by all members, and are refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stratagem.common.job import JobSpec
from stratagem.common.job.fields import RETURNED
from stratagem.worker.objectives.objective import (
    Assessment,
    Logged,
    LossValue,
    Objective,
    OutputLoss,
    ReturnedLoss,
    counts_rows,
    make_loss,
    one_number,
)
from stratagem.worker.user_code.call_notes import noted
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Step functions ----

MAX_LOGGED: Final = 16
MAX_NAME_CHARS: Final = 32
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.]*")
# fmt: off
_TAKEN: Final = frozenset({
    "loss", "loss_min", "loss_max", "loss_std", "lr", "grad_norm", "skipped_steps", "step_ratio",
    "cost_speedup", "wall_speedup", "predicted_steps", "consensus_distance", "mixing_distance",
    "neighbour_distance", "full_loss", "full_loss_change", "is_converging", "is_diverging",
    "refused_cycles", "phase_fallbacks",
})
# fmt: on
_TAKEN_BEGINNINGS: Final = ("loss.", "lr.", "max_", "micro_batch_", "trend_", "sent_")
_KEYS: Final = ("loss", "weight", "log")


def batch_of(x: Any, y: Any) -> Any:
    """Return the batch as it was collated: a pair, or another value."""
    return x if y is None or y is x else (x, y)


@dataclass(slots=True)
class _Watch:
    """Tells parameters' hooks whether a step function runs; these must not refer to the model."""

    is_on: bool = False

    def hook(self, _: Tensor) -> None:
        """Hook for a parameter's gradient, since a step function must not run backward."""
        if self.is_on:
            raise RuntimeError(
                "a step returns its loss and does not call backward: the gradient would be "
                "counted twice"
            )


@dataclass(frozen=True, slots=True)
class StepFunction:
    """Objective of jobs with a `step` function. predict: (model, batch) -> (output, target)."""

    function: Callable[[nn.Module, Any], Any]
    predict: Callable[[nn.Module, Any], Any] | None
    is_users: bool = field(default=True, init=False)
    counts_rows: bool = field(default=False, init=False)
    may_log: bool = field(default=True, init=False)
    _names: list[tuple[str, ...]] = field(default_factory=list, init=False)
    """Names logged by the first micro-batch; later ones must log the same."""
    _watches: WeakKeyDictionary[nn.Module, tuple[_Watch, list[nn.Parameter]]] = field(
        default_factory=WeakKeyDictionary, init=False
    )

    def __call__(self, model: nn.Module, x: Any, y: Any, num_rows: int) -> LossValue:
        """Compute the loss of a micro-batch by the step function."""
        watch, params = self._watched(model)
        versions = [param._version for param in params]
        watch.is_on = True
        try:
            with noted("the step, beside the model,", batch := batch_of(x, y)):
                returned = self.function(model, batch)
        finally:
            watch.is_on = False
            is_recording = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
        if versions != [param._version for param in params]:
            raise RuntimeError("a step computes a loss; it must not change parameters of the model")
        value = _loss_value(returned, num_rows)
        if not value.mean.requires_grad and value.weight:
            why = "" if is_recording else ": the step has switched gradients off"
            raise ValueError(
                f"the loss of the step has no gradient{why}; it must be computed from the model's "
                "output, outside of torch.no_grad() and without detach()"
            )
        self._check_names(tuple(logged.name for logged in value.log))
        return value

    def evaluate(
        self, model: nn.Module, x: Any, y: Any, num_rows: int, *, wants_output: bool
    ) -> Assessment:
        """Compute the loss of a batch without gradients, and the result of `predict`."""
        batch = batch_of(x, y)
        with noted("the step, beside the model,", batch):
            returned = self.function(model, batch)
        loss = _loss_value(returned, num_rows)
        if not wants_output or self.predict is None:
            return Assessment(loss, None, None)
        return Assessment(loss, *predicted(self.predict, model, batch))

    def _watched(self, model: nn.Module) -> tuple[_Watch, list[nn.Parameter]]:
        watched = self._watches.get(model)
        if watched is None:
            watch, params = _Watch(), list(model.parameters())
            for param in params:
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(watch.hook)
            watched = self._watches[model] = watch, params
        return watched

    def _check_names(self, names: tuple[str, ...]) -> None:
        if not self._names:
            self._names.append(names)
        elif names != self._names[0]:
            raise ValueError(other_names(names, self._names[0]))


@dataclass(frozen=True, slots=True)
class TurnsObjective:
    """Objective of jobs with turns, for evaluation only: the sum of the turns' losses."""

    of_turns: Sequence[StepFunction]
    is_users: bool = field(default=True, init=False)
    counts_rows: bool = field(default=False, init=False)
    may_log: bool = field(default=True, init=False)

    def __call__(self, model: nn.Module, x: Any, y: Any, num_rows: int) -> LossValue:
        """Raise AssertionError: in training each turn has its own objective."""
        raise AssertionError("a turn is trained by its own objective")

    def evaluate(
        self, model: nn.Module, x: Any, y: Any, num_rows: int, *, wants_output: bool
    ) -> Assessment:
        """Compute the sum of the turns' losses over a batch, as a mean over rows."""
        first, *others = self.of_turns
        outcome = first.evaluate(model, x, y, num_rows, wants_output=wants_output)
        mean = outcome.loss.mean
        for objective in others:
            further = objective.evaluate(model, x, y, num_rows, wants_output=False)
            mean = mean + further.loss.mean
        return Assessment(LossValue(mean, num_rows), outcome.output, outcome.target)


def predicted(
    predict: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any
) -> tuple[Any, Any]:
    """Return (output, target) of a batch from `predict`. Raises ValueError for other results."""
    with noted("predict, beside the model,", batch):
        pair = predict(model, batch)
    if not (isinstance(pair, tuple) and len(pair) == 2):
        text = f"predict returned a {type(pair).__name__} instead of a pair (output, target)"
        raise ValueError(text)
    return pair


def other_names(names: tuple[str, ...], first: tuple[str, ...]) -> str:
    """Return a text about logged names that differ from those of the first micro-batch."""
    missing = ", ".join(sorted(set(first) - set(names)))
    further = ", ".join(sorted(set(names) - set(first)))
    parts = [f"lacks {missing}" if missing else "", f"has {further} as well" if further else ""]
    what = " and ".join(filter(None, parts))
    return f"the log of the step must have the same names in each micro-batch; this one {what}"


def _loss_value(returned: Any, num_rows: int) -> LossValue:
    match returned:
        case Mapping():
            unknown = [str(key) for key in returned if key not in _KEYS]
            if unknown or "loss" not in returned:
                had = ", ".join(map(str, returned)) or "nothing"
                text = f"the step returned a mapping with {had}; it has loss, and may have weight "
                raise ValueError(f"{text}and log")
            mean, weight = returned["loss"], returned.get("weight", num_rows)
            log = tuple(_logged(returned.get("log") or {}, num_rows))
        case (mean, weight):
            log = ()
        case mean:
            weight, log = num_rows, ()
    return LossValue(one_number(mean, "the loss of the step"), _weight(weight, "loss"), log)


def _logged(log: Any, num_rows: int) -> Iterator[Logged]:
    """Yield the logged numbers, sorted by name."""
    if not isinstance(log, Mapping):
        raise ValueError(f"the log of the step is a mapping, not a {type(log).__name__}")
    if len(log) > MAX_LOGGED:
        text = f"the log of the step has {len(log)} names; at most {MAX_LOGGED} are allowed"
        raise ValueError(text)
    for name in log:
        check_log_name(name)
    for name, value in sorted(log.items()):
        mean, weight = value if isinstance(value, tuple) else (value, num_rows)
        if isinstance(mean, Tensor):
            mean = one_number(mean.detach(), f"log {name!r}")
        elif not isinstance(mean, int | float):
            raise ValueError(f"log {name!r} is a number, not a {type(mean).__name__}")
        yield Logged(name, mean, _weight(weight, f"log {name!r}"))


def check_log_name(name: Any) -> None:
    """Raise ValueError unless the name is allowed for a series."""
    is_name = isinstance(name, str) and len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name)
    if not is_name:
        allowed = f"at most {MAX_NAME_CHARS} of A-Z, a-z, 0-9, _ and ., a letter first"
        raise ValueError(f"{name!r} is no name for the log of the step; allowed are {allowed}")
    if name in _TAKEN or name.startswith(_TAKEN_BEGINNINGS):
        raise ValueError(f"{name!r} is the name of a series of ours; the log needs another one")


def _weight(value: Any, what: str) -> float:
    weight = float(value)
    if not 0.0 <= weight < float("inf"):
        raise ValueError(f"the weight of {what} is {weight}; it must be a number from 0 on")
    return weight


# ---- Objective of a job ----
#
# Only `make_objective` knows all kinds of objectives.


def make_objective(job: JobSpec, entrypoints: EntryPoints) -> Objective:
    """Make a job's objective: its step function, its loss, or the sum of its turns' losses."""
    if job.turns is not None:
        return TurnsObjective(step_functions(job, entrypoints))
    if job.step is None:
        if job.loss.name == RETURNED:
            return ReturnedLoss(job.loss.weight)
        return OutputLoss(make_loss(job.loss, entrypoints), counts_rows(job.loss))
    return StepFunction(entrypoints.resolve(job.step, "step"), _predict(job, entrypoints))


def step_functions(job: JobSpec, entrypoints: EntryPoints) -> list[StepFunction]:
    """Make the objective of each turn of a job."""
    predict = _predict(job, entrypoints)
    return [
        StepFunction(entrypoints.resolve(turn.step, f"turns[{place}].step"), predict)
        for place, turn in enumerate(job.turns or ())
    ]


def _predict(job: JobSpec, entrypoints: EntryPoints) -> Callable[..., Any] | None:
    return None if job.predict is None else entrypoints.resolve(job.predict, "predict")

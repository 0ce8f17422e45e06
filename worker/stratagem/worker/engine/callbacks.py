"""Call the hooks of the callbacks object that a job names.

Hooks are the user's code: an exception in a hook ends the run as the user's error, with file and
line. Their random numbers depend on the step alone. The module knows neither the exchange nor the
coordinator.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, UserCodeError, Violation
from stratagem.common.job import JobSpec
from stratagem.common.numerics.keys import Key, mix
from stratagem.common.schema.document import refuse
from stratagem.common.schema.json import suggest
from stratagem.common.strategy import (
    DataParallel,
    Decentralized,
    Federated,
    ModelParallel,
    Strategy,
    local_steps_of,
    partitions_state,
)
from stratagem.worker.data.rows import generators_kept, seed_generators
from stratagem.worker.engine.forward_backward import NUM_EXTRAS, means, packed, unpacked
from stratagem.worker.exchange.transports import END
from stratagem.worker.objectives.step_function import MAX_LOGGED, check_log_name
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

# ---- View of an evaluation ----
#
# `on_evaluation` gets this view: the numbers of the evaluation, and the requests it may make.


@dataclass(slots=True)
class EvaluationView:
    """The numbers of a finished evaluation of a whole split. Changing it has no effect."""

    step: int
    """Number of steps applied before the evaluation; under Federated, number of rounds."""
    split: str
    metrics: Mapping[str, float]
    """The loss and the metrics of the job, by name."""
    logged: dict[str, float] = field(default_factory=dict)
    wants_end: bool = False

    def log(self, name: str, value: float) -> None:
        """Record a number in the series `evaluation.<name>` for this evaluation."""
        add_logged(self.logged, name, value)

    def stop(self) -> None:
        """End the training with the evaluated state."""
        self.wants_end = True


# ---- View of a step ----
#
# `on_step` gets this view: the numbers of the step, and the requests it may make.


@dataclass(slots=True)
class StepView:
    """The numbers of one finished step, without tensors. Changing it has no effect."""

    step: int
    """The number of the step, from 1."""
    loss: float
    weight: float
    """Number of rows or tokens that the step learned from; 0 if the step was skipped."""
    num_rows: int
    grad_norm: float
    """2-norm of the whole gradient before clipping."""
    metrics: Mapping[str, float]
    """Further metrics of the step, besides the loss."""
    logged: dict[str, float] = field(default_factory=dict)
    wants_end: bool = False

    def log(self, name: str, value: float) -> None:
        """Record a number in the series `train.<name>`; each segment reports the latest value."""
        add_logged(self.logged, name, value)

    def stop(self) -> None:
        """End the training with this step, on all workers."""
        self.wants_end = True


def add_logged(logged: dict[str, float], name: str, value: float) -> None:
    """Record a number that the user's code logs; raises ValueError if it is not allowed."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; view.log takes finite numbers")
    check_log_name(name)
    if name not in logged and len(logged) == MAX_LOGGED:
        raise ValueError(f"{name!r} is one name too many; view.log takes {MAX_LOGGED} at once")
    logged[name] = number


# ---- Callbacks ----

HOOKS: Final = ("on_build", "on_gradients", "on_step", "on_evaluation")
_FIELD: Final = "callbacks"


class Randomness(Protocol):
    """Seeds the random generators that the user's code draws from."""

    def begin(self, *key: int | str) -> None:
        """Seed the random generators from the key."""

    def end(self) -> None:
        """Restore the generators to their state before `begin`."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The job's hooks by name; empty if the job names no callbacks. Used by one thread."""

    seed: int
    hooks: Mapping[str, Callable[..., object]]

    @property
    def takes_gradients(self) -> bool:
        """True if there is a hook that may change the gradient of a step."""
        return "on_gradients" in self.hooks

    @property
    def sees_steps(self) -> bool:
        """True if a hook is called after each step."""
        return "on_step" in self.hooks

    @property
    def sees_evaluations(self) -> bool:
        """True if a hook is called after each evaluation."""
        return "on_evaluation" in self.hooks

    def saw_step(self, view: StepView) -> None:
        """Call on_step for a finished step."""
        with user_code(f"on_step of training step {view.step}"):
            self.hooks["on_step"](view)

    def saw_evaluation(self, view: EvaluationView) -> None:
        """Call on_evaluation for a finished evaluation."""
        with user_code(f"on_evaluation after step {view.step}"):
            self.hooks["on_evaluation"](view)

    def built(self, model: nn.Module) -> None:
        """Call on_build with a newly built model, on whose modules it may register hooks.

        Raises InvalidInputError if the model's tensors are others afterwards.
        """
        if "on_build" not in self.hooks:
            return
        before = _layout(model)
        with generators_kept(), user_code("on_build"):
            seed_generators(mix(self.seed, "on_build"))
            self.hooks["on_build"](model)
        if changed := sorted({name for name, _ in before ^ _layout(model)}):
            text = f"on_build changed the model's tensors {', '.join(changed)}; do it in model"
            raise InvalidInputError.at(_FIELD, text)

    def take_gradients(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        step: int,
        key: Key,
        randomness: Randomness,
        activity: str,
    ) -> None:
        """Call on_gradients with the gradients of the parameters, which it may change in place
        before they are applied.

        step: from 1. key: seeds the random numbers of the step.
        """
        gradients = {name: param.grad for name, param in named if param.grad is not None}
        shapes = {name: (grad.shape, grad.dtype) for name, grad in gradients.items()}
        randomness.begin("on_gradients", *key)
        try:
            with user_code(f"on_gradients of {activity}"):
                self.hooks["on_gradients"](dict(gradients), step)
        finally:
            randomness.end()
        for name, grad in gradients.items():
            if (grad.shape, grad.dtype) != shapes[name]:
                text = f"on_gradients changed the shape or type of the gradient of {name}"
                raise UserCodeError("ValueError", text, activity=activity)


NO_CALLBACKS: Final = Callbacks(0, {})


def make_callbacks(job: JobSpec, entrypoints: EntryPoints) -> Callbacks:
    """Make the callbacks object that a job names, by calling its entry point without arguments.

    Raises InvalidInputError for hooks that do not exist or do not go with the job's strategy.
    """
    if job.callbacks is None:
        return NO_CALLBACKS
    factory = entrypoints.resolve(job.callbacks, _FIELD)
    with user_code("making callbacks"):
        made = factory()
        hooks = {name: getattr(made, name) for name in dir(made) if name.startswith("on_")}
    refuse([*_unusable(hooks), *_out_of_place(hooks, job)])
    if not hooks:
        text = f"{job.callbacks} makes a {type(made).__name__} without hooks; there are "
        raise InvalidInputError.at(_FIELD, text + ", ".join(HOOKS))
    return Callbacks(job.seed, hooks)


def _unusable(hooks: Mapping[str, Any]) -> Iterator[Violation]:
    for name, hook in hooks.items():
        if name not in HOOKS:
            text = f"{name} is no hook{suggest(name, HOOKS)}; there are {', '.join(HOOKS)}"
            yield Violation(_FIELD, text)
        elif not callable(hook):
            yield Violation(_FIELD, f"{name} is a {type(hook).__name__}, which cannot be called")


def _out_of_place(hooks: Mapping[str, Any], job: JobSpec) -> Iterator[Violation]:
    if job.only_evaluates:
        for name in hooks:
            if name in ("on_gradients", "on_step"):
                text = f"{name} is never called: execution.gradient is None, so nothing is trained"
                yield Violation(_FIELD, text)
    if "on_evaluation" in hooks and (reason := _why_no_evaluations(job)):
        yield Violation(_FIELD, f"on_evaluation {reason}")
    if "on_gradients" in hooks:
        for field, strategy in _levels(job.strategy, "strategy"):
            if isinstance(strategy, ModelParallel):
                text = (
                    f"on_gradients cannot go with {field}.type ModelParallel: no stage holds the "
                    "gradients of all parameters"
                )
                yield Violation(_FIELD, text)
        if partitions_state(job.strategy):
            text = (
                "on_gradients cannot go with strategy.options.partition_state: no worker holds the "
                "gradients of all parameters"
            )
            yield Violation(_FIELD, text)
    if "on_step" in hooks:
        for field, strategy in _levels(job.strategy, "strategy"):
            if reason := _why_no_steps(strategy, field):
                yield Violation(_FIELD, f"on_step cannot go with {reason}")


def _why_no_evaluations(job: JobSpec) -> str:
    if job.evaluation is None:
        return "is never called: the job has no evaluation"
    if job.data.worker_local is not None and isinstance(job.strategy, Federated):
        text = "clients evaluate on rows of their own, and no worker has the numbers of all"
        return f"cannot go with data.worker_local under strategy.type Federated: {text}"
    return ""


def _why_no_steps(strategy: Strategy, field: str) -> str:
    match strategy:
        case DataParallel(aggregation=Decentralized()):
            return f"{field}.aggregation.method Decentralized: nodes have no step in common"
        case DataParallel() if local_steps_of(strategy) is not None:
            return f"{field}.options.local_steps: replicas have no step in common"
        case _:
            return ""


def _levels(strategy: Strategy, field: str) -> Iterator[tuple[str, Strategy]]:
    """Yield (path of the field in the job, strategy) for the strategy and all nested in it."""
    yield field, strategy
    inner = getattr(getattr(strategy, "options", None), "inner", None)
    if inner is not None:
        yield from _levels(inner, f"{field}.options.inner")


def _layout(model: nn.Module) -> set[tuple[str, object]]:
    tensors: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    return {(name, (t.shape, t.dtype, t.requires_grad)) for name, t in tensors.items()}


# ---- Answer of on_step ----
#
# Only the member that owns the first shard calls `on_step`. Its answer travels with the sums of the
# next step, from which all others learn what it has logged, so that it is not lost with that
# member.

_ONCE: Final = 1.0


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """Answer of on_step for the latest step: logged values, and whether to end the training."""

    logged: Mapping[str, float] = field(default_factory=dict)
    wants_end: bool = False


NO_ANSWER: Final = StepAnswer()


def wish_of(answer: StepAnswer, *, stop: bool) -> float:
    """Return this member's addend to the sum of all members' requests to stop. stop: whether to
    stop after this step. answer: the answer of on_step, which may request to stop before this
    step."""
    return float(stop) + (END if answer.wants_end else 0.0)


class AnswerExtras:
    """The part of a step's extras that carries the values logged by on_step for the previous step
    to all members; empty if the job has no on_step."""

    def __init__(self, callbacks: Callbacks, first: int) -> None:
        """Reserve the extras. first: the index of the first of these values among the extras."""
        self.num_extras = NUM_EXTRAS if callbacks.sees_steps else 0
        self._first = first

    def appended(self, extras: Tensor, shard: int, answer: StepAnswer) -> Tensor:
        """Return the extras of a shard with the logged values, which are zeros but for shard 0."""
        if shard or not answer.logged:
            nothing = torch.zeros(self.num_extras, dtype=torch.float64)
            return torch.cat([extras, nothing])
        logged = {name: (value, _ONCE) for name, value in answer.logged.items()}
        return torch.cat([extras, packed(logged)])

    def taken(self, total: Tensor) -> dict[str, float]:
        """Return the logged values. total: the sum of the extras over all shards."""
        return means(unpacked(total[self._first : self._first + self.num_extras]))

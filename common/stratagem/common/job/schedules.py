"""This module defines how hyperparameters change over the steps of a job: schedules, settings, and
phases.

The sections check themselves.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from stratagem.common.base.errors import Violation
from stratagem.common.job.fields import Mode
from stratagem.common.schema.document import (
    Count,
    EntrypointName,
    Items,
    Kwargs,
    NonEmptyItems,
    NotNegative,
    Positive,
    Section,
    Share,
    Whole,
    ZeroToOne,
    one_of,
    only_with,
)
from stratagem.common.schema.rules import rule

# ---- Learning rate schedule ----
#
# The section `optimizer.schedule` gives the factor of the learning rate by step, or an entry
# point that makes a scheduler of torch's kind. The worker computes the curves.

MAX_PARTS: Final = 64
_NEEDED: Final = {
    "step": "step_size_steps: 100",
    "multistep": "milestones: [100, 200]",
    "exponential": "gamma: 0.99",
    "restarts": "period_steps: 100",
    "chain": "parts: [{name: linear, steps: 100}, cosine]",
}
"""The field that each learning-rate curve requires, as an example line for the error message."""
_OF_PLATEAU: Final = ("metric", "mode", "factor", "patience", "min_delta", "cooldown", "min_lr")
_EPSILON: Final = 1e-8
"""ReduceLROnPlateau of torch ignores reductions of a learning rate up to this size."""
_ONLY_IN: Final = {
    "step_size_steps": "step",
    "milestones": "multistep",
    "power": "polynomial",
    "period_steps": "restarts",
    "period_factor": "restarts",
    "up_fraction": "onecycle",
    "initial_lr_fraction": "onecycle",
    "parts": "chain",
    **dict.fromkeys(_OF_PLATEAU, "plateau"),
}


class ScheduleSpec(Section):
    """The schedule of the learning rate: a warm-up from 0 and then the named curve; or the user's
    own schedule, by entry point. Bare text is read as either, a list as a chain of schedules.

    steps: the length of the curve, warm-up included; by default it ends with the training, or with
    its part of the chain. milestones: the steps after the warm-up at which the rate is multiplied
    by gamma. power: the exponent of `polynomial`; by default 1. period_steps: the length of the
    first period of `restarts`; each later period is period_factor (by default 1) times as long as
    the one before. up_fraction: the fraction of `onecycle` (by default 0.3) in which the rate rises
    from initial_lr_fraction (by default 0.04).

    The other fields belong to `plateau`, which is torch's ReduceLROnPlateau with an absolute
    threshold: all rates are multiplied by factor (by default 0.1), but not reduced below min_lr
    (0), after more than patience (10) evaluations without an improvement by more than min_delta
    (0); the next cooldown (0) evaluations are not counted. metric and mode: by default those of
    evaluation.best.
    """

    name: (
        Literal[
            "constant",
            "linear",
            "cosine",
            "step",
            "multistep",
            "exponential",
            "polynomial",
            "restarts",
            "onecycle",
            "chain",
            "plateau",
        ]
        | None
    ) = None
    warmup_steps: Whole = 0
    final_lr_fraction: ZeroToOne = 0.0
    step_size_steps: Count | None = None
    gamma: Share = 0.1
    steps: Count | None = None
    # Absent from the text of jobs that do not use them: earlier versions do not know them.
    milestones: Items[Count] | None = None
    power: Positive | None = None
    period_steps: Count | None = None
    period_factor: Count | None = None
    up_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    initial_lr_fraction: ZeroToOne | None = None
    metric: str | None = None
    mode: Mode | None = None
    factor: Annotated[float, Field(gt=0, lt=1)] | None = None
    patience: Whole | None = None
    min_delta: NotNegative | None = None
    cooldown: Whole | None = None
    min_lr: NotNegative | None = None
    parts: Annotated["Items[ScheduleSpec]", Field(max_length=MAX_PARTS)] | None = None
    entrypoint: EntrypointName | None = None
    kwargs: Kwargs | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text_or_list(cls, value: object) -> object:
        if isinstance(value, list):
            return {"name": "chain", "parts": value}
        if isinstance(value, str):
            return {"entrypoint" if ":" in value else "name": value}
        return value

    @rule
    def _one_source(self) -> Iterator[Violation]:
        yield from one_of(self, ("name", "entrypoint"))
        yield from only_with(self, "kwargs", "entrypoint")

    @rule
    def _fields_fit_the_name(self) -> Iterator[Violation]:
        if self.name is None:
            yield from self._of_names()
        else:
            yield from self._misplaced()
            yield from self._in_parts()

    @property
    def num_tolerated(self) -> int:
        """Return the number of evaluations without improvement before a plateau begins."""
        return 10 if self.patience is None else self.patience

    def reduced(self, rate: float, num_reductions: int) -> float:
        """Return the learning rate after this many plateau reductions, applied as torch does."""
        for _ in range(num_reductions):
            lower = max(rate * (self.factor or 0.1), self.min_lr or 0.0)
            if rate - lower <= _EPSILON:
                return rate
            rate = lower
        return rate

    def _of_names(self) -> Iterator[Violation]:
        for field, info in type(self).model_fields.items():
            is_own = field in ("entrypoint", "kwargs")
            if not is_own and getattr(self, field) != info.get_default():
                yield Violation(field, "belongs to a schedule by name; the entry point has its own")

    def _misplaced(self) -> Iterator[Violation]:
        line = _NEEDED.get(self.name or "", "")
        needed, _, _ = line.partition(":")
        # A document that was written out names every field.
        if needed and (needed not in self.model_fields_set or not getattr(self, needed)):
            yield Violation(
                needed, f"missing; the {self.name} schedule needs it, for example {line}"
            )
        for field, name in _ONLY_IN.items():
            if name != self.name and getattr(self, field) is not None:
                yield Violation(field, f"belongs to the {name} schedule only")
        if self.name == "plateau" and self.steps is not None:
            yield Violation("steps", "has no meaning in plateau; evaluations decide its course")
        milestones = list(self.milestones or ())
        if milestones != sorted(set(milestones)):
            text = f"{milestones} do not ascend; each must be after the one before"
            yield Violation("milestones", text)

    def _in_parts(self) -> Iterator[Violation]:
        if self.parts and (self.warmup_steps or self.steps):
            field = "warmup_steps" if self.warmup_steps else "steps"
            yield Violation(field, "has no meaning in a chain; the parts have their own")
        parts = self.parts or ()
        for number, part in enumerate(parts):
            if part.name in ("chain", None):
                kind = "a chain" if part.entrypoint is None else "an entry point"
                yield Violation(f"parts[{number}]", f"is {kind}; a chain holds none")
            elif part.name == "plateau":
                text = "is a plateau, whose course evaluations decide; it stands alone"
                yield Violation(f"parts[{number}]", text)
            elif part.steps is None and number < len(parts) - 1:
                text = "missing; every part of a chain but the last needs it"
                yield Violation(f"parts[{number}].steps", text)


# ---- Settings by step ----
#
# The hyperparameters and seeds of one state are given by step. A population's result thereby
# becomes a section of a plain job, which is trained as the winner's state was, member after
# member of its lineage.


class SettingSpec(Section):
    """The field values with which the job trains from a given step on.

    from_step: the number of steps (rounds of a federation) after which the setting applies. seed:
    the seed of all random numbers from there on, as in the job. params: fields of the job by dotted
    path, such as "optimizer.lr"; all other fields keep the job's values.
    """

    from_step: Whole
    seed: Whole
    params: Kwargs


class HyperparameterSchedule(Section):
    """Settings in order of step, each of which changes fields of the job from its step on.

    last_step: the step after which the training ends; by default the end of the job. If the
    training ends earlier, learning-rate curves are cut off: they are still those for the whole
    length of the job.
    """

    settings: NonEmptyItems[SettingSpec]
    last_step: Count | None = None

    @rule
    def _in_order(self) -> Iterator[Violation]:
        steps = [setting.from_step for setting in self.settings]
        if steps[0]:
            text = f"{steps[0]} is not allowed; the first setting is from step 0 on"
            yield Violation("settings[0].from_step", text)
        for place, (before, step) in enumerate(pairwise(steps), start=1):
            if step <= before:
                text = f"{step} must be more than {before}, that of the setting before"
                yield Violation(f"settings[{place}].from_step", text)
        if self.last_step is not None and self.last_step <= steps[-1]:
            text = f"{self.last_step} must be more than {steps[-1]}, where the last setting begins"
            yield Violation("last_step", text)

    def ends(self, num_steps: int) -> tuple[int, ...]:
        """Return the last step of each setting, in a job of this many steps."""
        ends = (setting.from_step for setting in self.settings[1:])
        return (*ends, self.last_step or num_steps)


# ---- Phases ----
#
# The section `phases` has steps whose gradient is predicted instead of computed.
#
# A cycle is `full_steps` exact steps, then `predict_steps` predicted ones with one exact step (a
# correction) after every `correct_every` of them.

# A prediction is a line through at least two gradients.
_Lengths = Annotated[int, Field(ge=2, le=10_000)]
_Share = Annotated[float, Field(gt=0, le=1)]

_ONLY_WITH: Final = {
    "history": "wls",
    "decay": "wls",
    "damping": "wls",
    "momentum": "momentum",
}


class PredictorSpec(Section):
    """Settings of the extrapolation of a gradient from earlier exact gradients.

    wls: a weighted least-squares line through the last `history` gradients, in which the weight of
    a gradient is multiplied by `decay` for each step of age; the line is followed for `damping +
    damping² + …` steps. momentum: the last gradient plus the last difference per step times
    `momentum + momentum² + …`.
    """

    kind: Literal["wls", "momentum"] = "wls"
    history: Annotated[int, Field(ge=2, le=64)] = 4
    decay: _Share = 0.95
    damping: Annotated[float, Field(ge=0, le=1)] = 0.9
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.9

    @rule
    def _settings_fit_the_kind(self) -> Iterator[Violation]:
        for name, kind in _ONLY_WITH.items():
            if kind != self.kind and getattr(self, name) != type(self).model_fields[name].default:
                yield Violation(name, f"belongs to kind {kind} only")


class AdaptationSpec(Section):
    """Settings of how the lengths of the phases adapt to the loss of Full steps, and the limits of
    the lengths.

    loss_threshold: the relative increase of |loss| that counts as a rise. window: the number of
    losses in each of the two consecutive windows that are compared. Limits that are not set follow
    from the configured lengths: half and four times full_steps, a quarter and twice predict_steps.
    """

    enabled: bool = True
    loss_threshold: Annotated[float, Field(gt=0)] = 0.1
    window: Annotated[int, Field(ge=1, le=50)] = 10
    min_full_steps: _Lengths | None = None
    max_full_steps: _Lengths | None = None
    min_predict_steps: Count | None = None
    max_predict_steps: Count | None = None


class PhasesSpec(Section):
    """Settings of phase training, which alternates between steps with computed and with predicted
    gradients. With predict_steps 0 no gradient is predicted.

    warmup_steps: exact steps before the first cycle. trust: the largest norm of a prediction, as a
    multiple of the norm of the last exact gradient. max_relative_error and min_correlation: the
    accuracy that a prediction of a known gradient must reach before gradients are predicted.
    correction_weight: the fraction of (exact − predicted) that an accepted correction adds.
    """

    full_steps: _Lengths = 8
    predict_steps: Annotated[int, Field(ge=0, le=10_000)] = 16
    correct_every: Count = 4
    warmup_steps: Whole = 0
    predictor: PredictorSpec = PredictorSpec()
    trust: Annotated[float, Field(gt=0)] = 1.0
    max_relative_error: Annotated[float, Field(gt=0)] = 0.25
    min_correlation: Annotated[float, Field(ge=-1, le=1)] = 0.8
    correction_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    adaptive: AdaptationSpec = AdaptationSpec()

    @property
    def full_limits(self) -> tuple[int, int]:
        """Return the minimum and maximum of steps with computed gradients per cycle."""
        low, high = self.adaptive.min_full_steps, self.adaptive.max_full_steps
        least = max(2, self.full_steps // 2) if low is None else low
        return least, 4 * self.full_steps if high is None else high

    @property
    def predict_limits(self) -> tuple[int, int]:
        """Return the minimum and maximum of steps with predicted gradients per cycle, or (0, 0)."""
        if self.predict_steps == 0:
            return 0, 0
        low, high = self.adaptive.min_predict_steps, self.adaptive.max_predict_steps
        least = -(-self.predict_steps // 4) if low is None else low
        return least, 2 * self.predict_steps if high is None else high

    @rule
    def _lengths_lie_within_their_limits(self) -> Iterator[Violation]:
        for name, value, (least, most) in (
            ("full_steps", self.full_steps, self.full_limits),
            ("predict_steps", self.predict_steps, self.predict_limits),
        ):
            if value < least:
                text = f"{least} is more than {name}, {value}"
                yield Violation(f"adaptive.min_{name}", text)
            if value > most:
                text = f"{most} is less than {name}, {value}"
                yield Violation(f"adaptive.max_{name}", text)

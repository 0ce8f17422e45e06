"""The section `optimizer.schedule`: the factor by which the learning rate follows the steps, or an
entry point that makes a scheduler of torch's kind.

Checks itself; the curves are computed by the worker (`engine/optim/learning_rate.py`).
"""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from stratagem.common.base.errors import Violation
from stratagem.common.job.evaluation.followed_metric import Mode
from stratagem.common.schema.document import Section, one_of, only_with
from stratagem.common.schema.field_types import (
    Count,
    EntrypointName,
    Items,
    Kwargs,
    NotNegative,
    Positive,
    Share,
    Whole,
    ZeroToOne,
)
from stratagem.common.schema.rules import rule

MAX_PARTS: Final = 64
_NEEDED: Final = {
    "step": "step_size_steps: 100",
    "multistep": "milestones: [100, 200]",
    "exponential": "gamma: 0.99",
    "restarts": "period_steps: 100",
    "chain": "parts: [{name: linear, steps: 100}, cosine]",
}
"""The field that a curve needs, as a line."""
_OF_PLATEAU: Final = ("metric", "mode", "factor", "patience", "min_delta", "cooldown", "min_lr")
_EPSILON: Final = 1e-8
"""Of torch's ReduceLROnPlateau: a rate that would change by no more than this stays as it is."""
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
    """The schedule of the learning rate: a warm-up from 0, then the named curve; or the user's, by
    entry point. Bare text is either, a list is a chain of schedules.

    steps: the curve's length, warm-up included; None: to the end of the training, or of the part of
    the chain. milestones: steps after the warm-up at which the rate is multiplied by gamma. power:
    of `polynomial`; None: 1. period_steps: length of the first period of `restarts`; each following
    one is period_factor times as long, None: 1. up_fraction: the share of `onecycle` in which the
    rate rises from initial_lr_fraction; None: 0.3 and 0.04.

    The others are of `plateau`, torch's ReduceLROnPlateau with an absolute threshold: all rates are
    multiplied by factor (None: 0.1), but not below min_lr (0), after more than patience (10)
    evaluations without an improvement by more than min_delta (0); then cooldown (0) evaluations are
    not counted. metric and mode: those of evaluation.best unless set.
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
        """Return the evaluations without an improvement after which a plateau is not one yet."""
        return 10 if self.patience is None else self.patience

    def reduced(self, rate: float, num_reductions: int) -> float:
        """Return a rate after as many reductions of a plateau, one by one as torch does."""
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

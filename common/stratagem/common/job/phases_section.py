"""The section `phases`: steps whose gradient is predicted instead of computed.

A cycle is `full_steps` exact steps, then `predict_steps` predicted ones with one exact step (a
correction) after every `correct_every` of them. Checks itself; knows no torch and no strategy.
"""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field

from stratagem.common.base.errors import Violation
from stratagem.common.schema.document import Section
from stratagem.common.schema.field_types import Count, Whole
from stratagem.common.schema.rules import rule
from stratagem.common.strategy import (
    AllReduce,
    Custom,
    DataParallel,
    Federated,
    Local,
    ModelParallel,
    ParameterServer,
    PopulationBased,
    Strategy,
)

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
    """Settings of how a gradient is extrapolated from exact ones.

    wls: a weighted line through the last `history` gradients, each step of age weighing `decay`
    times less, followed `damping + damping² + …` steps far. momentum: the last gradient plus the
    last difference per step, times `momentum + momentum² + …`.
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
    """Settings of how the lengths follow the loss of Full steps, and their limits.

    loss_threshold: a rise by this share of |loss| is a rise; window: losses in each of the two
    halves that are compared. Limits that are absent follow from the configured lengths: half and
    four times full_steps, a quarter and twice predict_steps.
    """

    enabled: bool = True
    loss_threshold: Annotated[float, Field(gt=0)] = 0.1
    window: Annotated[int, Field(ge=1, le=50)] = 10
    min_full_steps: _Lengths | None = None
    max_full_steps: _Lengths | None = None
    min_predict_steps: Count | None = None
    max_predict_steps: Count | None = None


class PhasesSpec(Section):
    """Phase training. predict_steps 0 means never to predict.

    warmup_steps: exact steps before the first cycle. trust: a prediction is at most this many
    times as long as the last exact gradient. max_relative_error, min_correlation: what a
    prediction must have reached on a known gradient before others are predicted.
    correction_weight: share of (exact − predicted) added in an accepted correction.
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
        """(least, most) Full steps of a cycle that adaptation may choose."""
        low, high = self.adaptive.min_full_steps, self.adaptive.max_full_steps
        least = max(2, self.full_steps // 2) if low is None else low
        return least, 4 * self.full_steps if high is None else high

    @property
    def predict_limits(self) -> tuple[int, int]:
        """(least, most) Predict steps of a cycle that adaptation may choose; (0, 0) for never."""
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


def reason_against(strategy: Strategy) -> str | None:
    """Why phases cannot run under this strategy; None where they can.

    What decides the phases must be the same on all members, and is where every member holds the
    sum over the whole batch and the whole model.
    """
    match strategy:
        case Local():
            return None
        case DataParallel(aggregation=AllReduce() | ParameterServer()) | PopulationBased():
            return reason_against(strategy.options.inner or Local())
        case DataParallel():
            return "not under Decentralized: each node has gradients of its own to predict from"
        case Federated():
            return (
                "not under Federated: a client begins each round afresh, without a history to "
                "predict from"
            )
        case ModelParallel():
            return (
                "not under ModelParallel: a stage sees only its own share of the gradient, and "
                "whether a prediction was good is asked of the whole"
            )
        case Custom():
            return "not under Custom: what it has its workers do is not known here"

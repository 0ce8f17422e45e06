"""The section `weight_average`: an average of the parameters over the steps of a run.

It is kept beside the parameters and changes nothing of the training. Checks itself; knows no torch.
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

_DECAY: Final = 0.999


class WeightAverageSpec(Section):
    """Settings of the average of the parameters that is kept beside them.

    ema: exponential, average = decay · average + (1 − decay) · parameter, with decay 0.999 unless
    set. swa: the mean of all that was averaged. The average is updated after step `start_step` and
    after each `every` steps from there; the first update takes the parameters as they are. Under
    Federated it is that of the global model, and rounds take the place of steps.
    """

    kind: Literal["ema", "swa"] = "ema"
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    start_step: Whole = 0
    every: Count = 1

    @rule
    def _decay_belongs_to_ema(self) -> Iterator[Violation]:
        if self.decay is not None and self.kind != "ema":
            yield Violation("decay", f"belongs to kind ema only; the kind is {self.kind}")

    def is_due(self, step: int) -> bool:
        """Return whether the average is updated after step `step`, which counts from 1."""
        return step >= self.start_step and (step - self.start_step) % self.every == 0

    def weight(self, num_averaged: int) -> float:
        """Return the weight of the parameters in the update that follows `num_averaged` others."""
        if num_averaged == 0:
            return 1.0
        if self.kind == "swa":
            return 1.0 / (num_averaged + 1)
        return 1.0 - (_DECAY if self.decay is None else self.decay)


def reason_against(strategy: Strategy, field: str = "strategy") -> str | None:
    """Why no average of the parameters is kept under this strategy; None where there is one.

    field: the path of the strategy in the job.
    """
    match strategy:
        case Local() | ModelParallel():
            return None
        case Federated() if field == "strategy":
            return None
        case DataParallel(aggregation=AllReduce() | ParameterServer()) | PopulationBased():
            inner = strategy.options.inner
            return None if inner is None else reason_against(inner, f"{field}.options.inner")
        case DataParallel():
            return (
                f"cannot go with {field}.aggregation.method Decentralized: each node has "
                "parameters of its own, and what is committed is their mean"
            )
        case Federated():
            return f"cannot go with {field}.type Federated inside of another strategy"
        case Custom():
            return f"cannot go with {field}.type Custom: what it has workers do is not known here"

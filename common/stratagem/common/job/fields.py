"""Parse the small fields of a job that several sections share: intervals, names, metrics and the
row order.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, cast

from pydantic import PlainSerializer, PlainValidator, model_validator

from stratagem.common.base import ids
from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.base.text import CLIENT_MEAN as CLIENT_MEAN
from stratagem.common.base.text import SHARES as SHARES
from stratagem.common.base.text import of_metric as of_metric
from stratagem.common.base.text import range_of as range_of
from stratagem.common.base.text import without_spreads as without_spreads
from stratagem.common.schema.document import (
    Count,
    EntrypointName,
    NotNegative,
    Section,
    colon_hint,
    one_of,
)
from stratagem.common.schema.json import not_one_of, unknown_key
from stratagem.common.schema.rules import rule

# ---- Intervals ----
#
# An interval says how often something happens: "1 epoch", "100 steps", "2 rounds", "1
# generation". The job checks which unit has a meaning under which strategy.

Unit: TypeAlias = Literal["epoch", "step", "round", "generation"]

_SPELLING: Final = re.compile(r"([1-9][0-9]{0,17}) (epoch|step|round|generation)s?")


@dataclass(frozen=True, slots=True)
class Every:
    """An interval: once every `count` units."""

    count: int
    unit: Unit

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read the spelling that `str()` writes; singular and plural are equal."""
        matched = _SPELLING.fullmatch(text) if isinstance(text, str) else None
        if matched is None:
            raise InvalidInputError(f"{text!r} is not like 1 epoch, 100 steps or 2 rounds")
        return cls(int(matched[1]), cast(Unit, matched[2]))

    def __str__(self) -> str:
        return f"{self.count} {self.unit}{'' if self.count == 1 else 's'}"


EveryField: TypeAlias = Annotated[
    Every,
    PlainValidator(lambda value: value if isinstance(value, Every) else Every.parse(value)),
    PlainSerializer(str),
]


# ---- Built-in losses and metrics ----
#
# These tables list the losses and metrics that a job can name, for places without torch.
#
# The worker has their functions; a test compares the two. Names are checked with the section that
# holds them, so a wrong one is refused together with all other errors of a job.

LOSSES: Final[Mapping[str, tuple[str, ...]]] = {
    "bce_with_logits": ("pos_weight",),
    "cross_entropy": ("label_smoothing",),
    "l1": (),
    "model": (),
    "mse": (),
    "nll": (),
    "token_cross_entropy": ("ignore_index", "label_smoothing"),
}
"""The names of the built-in losses, each with its keyword arguments."""
RETURNED: Final = "model"
"""The loss name for a model whose forward itself returns the loss along with its outputs."""
FROM_LOSS: Final = ("loss", "perplexity")
"""Metrics that can be computed from the loss alone."""
METRICS: Final = ("accuracy", *FROM_LOSS, "mae", "mse", "top5_accuracy")


def check_loss_name(value: str) -> str:
    """Return the name of a loss; raise InvalidInputError for one that is not in the table."""
    if value not in LOSSES and ids.are_checked():
        raise InvalidInputError(not_one_of(value, sorted(LOSSES)) + colon_hint(value))
    return value


def check_metric_name(value: str) -> str:
    """Return the name of a metric, or an entry point; raise InvalidInputError for other names."""
    if ":" not in value and value not in METRICS and ids.are_checked():
        raise InvalidInputError(not_one_of(value, METRICS) + colon_hint(value))
    return value


def check_loss_kwargs(name: str, kwargs: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield an error for each keyword argument that a built-in loss does not take."""
    for key in kwargs:
        if key not in LOSSES.get(name, (key,)):
            yield Violation(f"kwargs.{key}", unknown_key(key, LOSSES[name]))


# ---- Followed metrics ----
#
# The section `evaluation.stop`, and a schedule that follows a metric, name the metrics whose
# course decides how a run continues. The coordinator decides that from the journaled evaluations
# (coordinator/core/courses.py).

Mode: TypeAlias = Literal["max", "min"]


class StopSpec(Section):
    """Early stopping: the training ends after `patience` evaluations in a row without an
    improvement.

    metric and mode: by default those of evaluation.best. min_delta: a value is an improvement only
    if it is better than the best one so far by more than this.
    """

    metric: str | None = None
    mode: Mode | None = None
    patience: Count
    min_delta: NotNegative = 0.0


# ---- Row order ----
#
# The section `data.order` says in which order a run passes the training rows.

_OWNERS = {
    "weights": "weighted",
    "num_rows": "weighted",
    "lengths": "bucketed",
    "window": "bucketed",
}


class OrderSpec(Section):
    """The order of the training rows in each epoch: a built-in order by name, or an entry point.
    Bare text is read as either."""

    by: Literal["shuffle", "sequential", "weighted", "bucketed"] | None = None
    entrypoint: EntrypointName | None = None
    weights: EntrypointName | None = None
    num_rows: Count | None = None
    lengths: EntrypointName | None = None
    window: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if isinstance(value, str):
            return {"entrypoint" if ":" in value else "by": value}
        return dict(value) if isinstance(value, Mapping) else value

    @rule
    def _one_source(self) -> Iterable[Violation]:
        return one_of(self, ("by", "entrypoint"))

    @rule
    def _goes_together(self) -> Iterator[Violation]:
        for name, owner in _OWNERS.items():
            if getattr(self, name) is not None and self.by != owner:
                yield Violation(name, f"has a meaning only with by: {owner}")
        for owner, name in (("weighted", "weights"), ("bucketed", "lengths")):
            if self.by == owner and getattr(self, name) is None:
                yield Violation(
                    name, f"missing; by: {owner} needs it, for example {name}: my_module:{name}"
                )

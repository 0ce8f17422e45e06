"""Lists the losses and metrics that a job can name, for places without torch.

The worker has their functions; a test compares the two. Names are checked with the section that
holds them, so that a wrong one is refused with everything else that is wrong in a job.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stratagem.common.base import limits
from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.field_types import colon_hint
from stratagem.common.schema.json_text import not_one_of, unknown_key

LOSSES: Final[Mapping[str, tuple[str, ...]]] = {
    "bce_with_logits": ("pos_weight",),
    "cross_entropy": ("label_smoothing",),
    "l1": (),
    "model": (),
    "mse": (),
    "nll": (),
    "token_cross_entropy": ("ignore_index", "label_smoothing"),
}
"""The keyword arguments of each."""
RETURNED: Final = "model"
"""The loss that the model returns itself, beside its outputs."""
FROM_LOSS: Final = ("loss", "perplexity")
"""Metrics that follow from the loss."""
METRICS: Final = ("accuracy", *FROM_LOSS, "mae", "mse", "top5_accuracy")


def check_loss_name(value: str) -> str:
    """The name of a loss; raises InvalidInputError for one that is not in the table."""
    if value not in LOSSES and limits.are_checked():
        raise InvalidInputError(not_one_of(value, sorted(LOSSES)) + colon_hint(value))
    return value


def check_metric_name(value: str) -> str:
    """The name of a metric, or an entry point; raises InvalidInputError for other names."""
    if ":" not in value and value not in METRICS and limits.are_checked():
        raise InvalidInputError(not_one_of(value, METRICS) + colon_hint(value))
    return value


def check_loss_kwargs(name: str, kwargs: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield the keyword arguments that a loss of the table does not take."""
    for key in kwargs:
        if key not in LOSSES.get(name, (key,)):
            yield Violation(f"kwargs.{key}", unknown_key(key, LOSSES[name]))

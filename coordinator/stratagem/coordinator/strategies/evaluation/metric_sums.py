"""The sums of an evaluation, and the metrics that follow from them.

Sums are by name: "<split>/<metric>" is the sum of metric times weight, "<split>/weight:<metric>"
that of the weights of a metric with weights of its own, and "<split>/weight:" of all others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

WEIGHT = "weight:"
LOSS = "loss"
PERPLEXITY = "perplexity"


def added(sums: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the totals by name, added in the order given."""
    totals: dict[str, float] = {}
    for part in sums:
        for name, value in sorted(part.items()):
            totals[name] = totals.get(name, 0.0) + value
    return totals


def means(totals: Mapping[str, float], metrics: Sequence[str]) -> dict[str, float]:
    """Return the weighted means by "<split>.<metric>".

    perplexity is exp of the mean loss, so it has no sum of its own.
    """
    averages: dict[str, float] = {}
    for key, total in totals.items():
        split, _, name = key.partition("/")
        weight = totals.get(f"{split}/{WEIGHT}{name}", totals.get(f"{split}/{WEIGHT}", 0.0))
        if not name.startswith(WEIGHT) and weight > 0:
            averages[f"{split}.{name}"] = total / weight
    if PERPLEXITY in metrics:
        for split in sorted({key.partition("/")[0] for key in totals}):
            averages[f"{split}.{PERPLEXITY}"] = _exp(averages.get(f"{split}.{LOSS}", math.nan))
    return averages


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf

"""Metrics of a state that several clients have evaluated, each on rows that only it has."""

import math
from collections.abc import Mapping, Sequence

WEIGHT = "weight:"
"""Prefix of the weight of a metric; alone, the weight of all that have none of their own."""


def combine(sums_of: Mapping[int, Mapping[str, float]], metrics: Sequence[str]) -> dict[str, float]:
    """Return weighted means by "<split>.<metric>", added in order of client.

    sums_of: by client, "<split>/<metric>" -> sum of metric times weight, "<split>/weight:<metric>"
    -> weight. Perplexity is exp of the mean loss.
    """
    totals: dict[str, float] = {}
    for client in sorted(sums_of):
        for name, value in sorted(sums_of[client].items()):
            totals[name] = totals.get(name, 0.0) + value
    means: dict[str, float] = {}
    for key, total in totals.items():
        split, _, name = key.partition("/")
        weight = totals.get(f"{split}/{WEIGHT}{name}", totals.get(f"{split}/{WEIGHT}", 0.0))
        if not name.startswith(WEIGHT) and weight > 0:
            means[f"{split}.{name}"] = total / weight
    if "perplexity" in metrics:
        for split in {key.partition("/")[0] for key in totals}:
            loss = means.get(f"{split}.loss", math.nan)
            means[f"{split}.perplexity"] = math.exp(loss) if loss < 700 else math.inf
    return means

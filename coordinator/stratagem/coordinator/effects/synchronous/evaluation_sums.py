"""Adds up the parts of an evaluation in order of batch: the result does not depend on which member
computed what.
"""

import math
from collections.abc import Iterable, Sequence

from stratagem.coordinator.strategies.federated.client_metrics import WEIGHT
from stratagem.v1 import worker_pb2

LOSS = "loss"
PERPLEXITY = "perplexity"
WEIGHT_PREFIX = WEIGHT
"""Key under which a metric with a weight of its own sends that weight."""


def client_sums(parts: Iterable[worker_pb2.EvaluationPart]) -> dict[str, float]:
    """Return the sums of one client: "<split>/<metric>" -> sum, "<split>/weight:" -> weight; in
    order of batch.
    """
    sums: dict[str, float] = {}
    for part in sorted(parts, key=lambda part: (part.split, part.batch)):
        for name, value in {**part.sums, WEIGHT_PREFIX: part.weight}.items():
            key = f"{part.split}/{name}"
            sums[key] = sums.get(key, 0.0) + value
    return sums


def fold_parts(
    parts: Iterable[worker_pb2.EvaluationPart], metrics: Sequence[str]
) -> dict[str, float]:
    """Weighted means by "<split>.<metric>"; a batch that came twice counts once.

    perplexity is exp of the mean loss, so it has no sum of its own.
    """
    by_batch = {(part.split, part.batch): part for part in parts}
    sums: dict[tuple[str, str], float] = {}
    for (split, _), part in sorted(by_batch.items()):
        given = {**part.sums, WEIGHT_PREFIX: part.weight}
        for name in sorted(given):
            sums[split, name] = sums.get((split, name), 0.0) + given[name]
    means: dict[str, float] = {}
    for (split, name), total in sums.items():
        if name.startswith(WEIGHT_PREFIX):
            continue
        own = sums.get((split, WEIGHT_PREFIX + name))
        weight = sums[split, WEIGHT_PREFIX] if own is None else own
        if weight > 0:
            means[f"{split}.{name}"] = total / weight
    if PERPLEXITY in metrics:
        for split in {split for split, _ in by_batch}:
            loss = means.get(f"{split}.{LOSS}", math.nan)
            means[f"{split}.{PERPLEXITY}"] = _exp(loss)
    return means


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf

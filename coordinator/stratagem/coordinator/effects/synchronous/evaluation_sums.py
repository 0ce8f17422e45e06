"""Adds up the parts of an evaluation in order of batch: the result does not depend on which member
computed what."""

from collections.abc import Iterable, Sequence

from stratagem.coordinator.strategies.evaluation.metric_sums import WEIGHT, added, means
from stratagem.v1 import worker_pb2


def sums_of(parts: Iterable[worker_pb2.EvaluationPart]) -> dict[str, float]:
    """Return the sums by name, as in metric_sums.py; a batch that came twice counts once."""
    by_batch = {(part.split, part.batch): part for part in parts}
    return added(
        {f"{split}/{name}": value for name, value in {**part.sums, WEIGHT: part.weight}.items()}
        for (split, _), part in sorted(by_batch.items(), key=lambda item: item[0])
    )


def fold_parts(
    parts: Iterable[worker_pb2.EvaluationPart], metrics: Sequence[str]
) -> dict[str, float]:
    """Return the weighted means by "<split>.<metric>"."""
    return means(sums_of(parts), metrics)

"""Training metrics of a federated round, over all its accepted updates together.

It depends on which updates were accepted and on nothing else: neither on the order in which they
came nor on what a coordinator that was killed had seen of them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from stratagem.coordinator.core.facts import SKIPPED_STEPS, TRAIN_LOSS, UpdateReceived
from stratagem.coordinator.strategies.scheduling.segment_schedule import TRAIN_SPLIT

TRAFFIC = frozenset({f"{TRAIN_SPLIT}.sent_bytes", f"{TRAIN_SPLIT}.uncompressed_bytes"})
"""Metrics that depend on who was there, and so belong to no commit."""
_LARGEST = f"{TRAIN_SPLIT}.max_"


def round_metrics(
    on_time: Mapping[int, UpdateReceived],
    late: Sequence[UpdateReceived] = (),
    num_skipped: float = 0.0,
) -> dict[str, float]:
    """Return the training metrics by name, of the clients of a round and of the late ones it takes.

    The loss is the mean over rows and, with its spread over clients, that of the clients of the
    round that tell theirs: late ones have trained another state. Bytes and skipped steps are sums,
    norms the largest ones, of all. num_skipped: steps that earlier rounds have skipped, which are
    added.
    """
    in_order = [update for _, update in sorted(on_time.items())]
    everybody = [*in_order, *late]
    metrics = {**_loss(in_order), **_of_steps(everybody), **_traffic(everybody)}
    if SKIPPED_STEPS in metrics:
        metrics[SKIPPED_STEPS] += num_skipped
    return metrics


def mean_loss(updates: Mapping[int, UpdateReceived]) -> float:
    """Return the mean over rows of the losses of clients of one round; 0 where there are none."""
    in_order = [
        update
        for _, update in sorted(updates.items())
        if update.num_samples and not math.isnan(update.loss)
    ]
    return _mean(in_order) if in_order else 0.0


def _loss(updates: Sequence[UpdateReceived]) -> dict[str, float]:
    updates = [update for update in updates if not math.isnan(update.loss)]
    weights = [update.num_samples for update in updates]
    losses = [update.loss for update in updates]
    total = sum(weights)
    if not total:
        return {}
    mean = _mean(updates)
    variance = _sum(w * (loss - mean) ** 2 for w, loss in zip(weights, losses, strict=True)) / total
    return {
        TRAIN_LOSS: mean,
        f"{TRAIN_LOSS}_min": min(losses),
        f"{TRAIN_LOSS}_max": max(losses),
        f"{TRAIN_LOSS}_std": math.sqrt(variance),
    }


def _mean(updates: Sequence[UpdateReceived]) -> float:
    total = sum(update.num_samples for update in updates)
    return _sum(update.num_samples * update.loss for update in updates) / total


def _of_steps(updates: Sequence[UpdateReceived]) -> dict[str, float]:
    """Combine the metrics that clients report of their steps: the largest, the sum, or the mean
    over rows."""
    metrics = {}
    for name in sorted({name for update in updates for name in update.metrics}):
        saying = [update for update in updates if name in update.metrics]
        values = [update.metrics[name] for update in saying]
        if name == SKIPPED_STEPS:
            # What an earlier version has received is counted already.
            metrics[name] = _sum(update.metrics[name] for update in saying if update.num_steps)
        elif name.startswith(_LARGEST):
            metrics[name] = max(values)
        else:
            weighted = _sum(update.num_samples * update.metrics[name] for update in saying)
            metrics[name] = weighted / sum(update.num_samples for update in saying)
    return metrics


def _traffic(updates: Sequence[UpdateReceived]) -> dict[str, float]:
    names = sorted({name for update in updates for name in update.traffic})
    return {
        f"{TRAIN_SPLIT}.{name}": float(sum(update.traffic.get(name, 0) for update in updates))
        for name in names
    }


def _sum(values: Iterable[float]) -> float:
    """Left to right: fsum refuses what overflows."""
    total = 0.0
    for value in values:
        total += value
    return total

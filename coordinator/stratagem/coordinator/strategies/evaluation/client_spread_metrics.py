"""How a metric spreads over the clients of a federation, each of which has measured it on its own
rows."""

import math
from collections.abc import Mapping, Sequence

from stratagem.common.job.fields import CLIENT_MEAN, SHARES
from stratagem.coordinator.strategies.evaluation.metric_sums import WEIGHT, means


def spread(of_clients: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the least, the greatest and three values between them of each metric, over the clients
    that have it; each client counts as one."""
    found: dict[str, float] = {}
    for name in sorted({name for metrics in of_clients for name in metrics}):
        values = sorted(metrics[name] for metrics in of_clients if name in metrics)
        if not any(map(math.isnan, values)):
            found |= {f"{name}.{last}": _at(values, share) for last, share in SHARES.items()}
    return found


def over_clients(
    sums: Sequence[Mapping[str, float]], own: Sequence[Mapping[str, float]], names: Sequence[str]
) -> dict[str, float]:
    """Return the spread of metrics that are sums over rows, and mean and spread of the user's own.

    sums and own: of each client; see metric_sums.py. Own ones are weighted by rows.
    """
    found = spread([means(each, names) for each in sums])
    for name in sorted({name for metrics in own for name in metrics}):
        weight = f"{name.partition('.')[0]}/{WEIGHT}"
        pairs = [
            (of_client.get(weight, 0.0), metrics[name])
            for of_client, metrics in zip(sums, own, strict=True)
            if name in metrics
        ]
        total = 0.0
        for rows, value in pairs:
            total += rows * value
        num_rows = math.fsum(rows for rows, _ in pairs)
        if num_rows > 0:
            found[f"{name}.{CLIENT_MEAN}"] = total / num_rows
    return found | spread(own)


def _at(values: Sequence[float], share: float) -> float:
    """Return the value at a share of the way through values in order, linear between two."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    before, after = values[low], values[math.ceil(place)]
    if before == after or place == low:
        return before
    return before + (place - low) * (after - before)

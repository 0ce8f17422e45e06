"""The names under which the spread of a metric over the clients of a federation stands beside it,
such as `test.accuracy.client_p10` beside `test.accuracy`."""

from collections.abc import Mapping
from typing import Final

CLIENT_MEAN: Final = "client_mean"
"""The mean of what clients have measured: for metrics that are no sums over rows."""
CLIENT_MIN: Final = "client_min"
CLIENT_MAX: Final = "client_max"
SHARES: Final[Mapping[str, float]] = {
    CLIENT_MIN: 0.0,
    "client_p10": 0.1,
    "client_median": 0.5,
    "client_p90": 0.9,
    CLIENT_MAX: 1.0,
}
"""Of the clients, in order of their values, up to which each name goes."""


def of_metric(name: str) -> str:
    """Return the metric that a name is the spread of; other names are their own."""
    metric, _, last = name.rpartition(".")
    return metric if last in SHARES else name


def without_spreads(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics without how they spread over clients."""
    return {name: value for name, value in metrics.items() if of_metric(name) == name}


def range_of(metrics: Mapping[str, float], name: str) -> tuple[float, float] | None:
    """Return the least and the greatest value of a metric over clients, where they are known.

    Beside a value over all rows, which may lie outside of it, stands the mean of what clients have
    measured: the range is that one's alone.
    """
    if f"{name}.{CLIENT_MEAN}" in metrics:
        return None
    metric = name.removesuffix(f".{CLIENT_MEAN}")
    low, high = (metrics.get(f"{metric}.{end}") for end in (CLIENT_MIN, CLIENT_MAX))
    return None if low is None or high is None else (low, high)

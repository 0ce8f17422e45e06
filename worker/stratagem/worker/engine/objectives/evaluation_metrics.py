"""Evaluation metrics: each answers (mean, weight) over one batch, so batches can be added.

Metrics of the user's own are here in runs of `numerics` 2 and before only, which finish under the
rule that they began with: a function (output, target) of a batch that returns a number, or (mean,
weight). The rule of later runs is in own_metrics.py.
`perplexity` is a function of the mean loss and has no sum of its own: it is computed
as exp(loss) where the parts are added up. Must not know data sets or ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from stratagem.common.job.fields import FROM_LOSS
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.user_code.entrypoints import EntryPoints

Metric = Callable[[Any, Any, int], tuple[float, float]]
"""(output, target, num_rows) -> (mean, weight)."""

_IGNORED: Final = -100


def make_metrics(
    names: Iterable[str], entrypoints: EntryPoints, numerics: int = CURRENT
) -> dict[str, Metric]:
    """The metrics by name, without those that follow from the loss or are of whole splits."""
    return {
        name: _make_metric(name, entrypoints)
        for name in dict.fromkeys(names)
        if name not in FROM_LOSS and (":" not in name or numerics < 3)
    }


def _make_metric(name: str, entrypoints: EntryPoints) -> Metric:
    if ":" in name:
        return _user_metric(entrypoints.resolve(name, "evaluation.metrics"))
    return _METRICS[name]


def _user_metric(function: Callable[..., Any]) -> Metric:
    def metric(output: Any, target: Any, num_rows: int) -> tuple[float, float]:
        value = function(output, target)
        mean, weight = value if isinstance(value, tuple) else (value, num_rows)
        return float(mean), float(weight)

    return metric


def _top_accuracy(output: Tensor, target: Tensor, num_best: int) -> tuple[float, float]:
    """Share of counted targets among the best classes; target -100 is not counted."""
    if output.shape == target.shape:  # one logit each: yes or no
        hits, counted = (output > 0) == (target > 0.5), torch.ones_like(target, dtype=torch.bool)
    else:
        # Classes stand last (tokens), or second as in torch's losses (images).
        dim = -1 if output.shape[:-1] == target.shape else 1
        best = output.topk(min(num_best, output.shape[dim]), dim=dim).indices
        hits, counted = (best == target.unsqueeze(dim)).any(dim), target != _IGNORED
    num_counted = int(counted.sum())
    return int((hits & counted).sum()) / max(num_counted, 1), num_counted


def _accuracy(output: Tensor, target: Tensor, num_rows: int) -> tuple[float, float]:
    return _top_accuracy(output, target, 1)


def _top5_accuracy(output: Tensor, target: Tensor, num_rows: int) -> tuple[float, float]:
    return _top_accuracy(output, target, 5)


def _difference(output: Tensor, target: Tensor) -> Tensor:
    if output.shape != target.shape:
        raise ValueError(
            f"output has shape {tuple(output.shape)} but target has {tuple(target.shape)}"
        )
    return output.double() - target.double()


def _mse(output: Tensor, target: Tensor, num_rows: int) -> tuple[float, float]:
    return _difference(output, target).square().mean().item(), num_rows


def _mae(output: Tensor, target: Tensor, num_rows: int) -> tuple[float, float]:
    return _difference(output, target).abs().mean().item(), num_rows


_METRICS: Final[Mapping[str, Metric]] = {
    "accuracy": _accuracy,
    "top5_accuracy": _top5_accuracy,
    "mse": _mse,
    "mae": _mae,
}

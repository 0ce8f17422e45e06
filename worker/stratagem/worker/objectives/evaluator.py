"""Evaluate a model on its splits: fixed batches in order, assigned to the members by number.

Results are sums per batch, not means, so that their sum in order of batch does not depend on the
assignment of batches to members.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.job.fields import FROM_LOSS
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.data.datasets import Dataset, Gather
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.numerics.model import ModelExecution
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.objectives.objective import Assessment, LossFunction, Objective, OutputLoss
from stratagem.worker.objectives.own_metrics import KeptBatch, OwnMetrics, make_own_metrics
from stratagem.worker.objectives.step_function import make_objective
from stratagem.worker.user_code.call_notes import noted
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

# ---- Evaluation metrics ----
#
# Each metric returns (mean, weight) over one batch, so batches can be added. The user's metrics are
# computed here only in runs of `numerics` 2 and before, which finish under the rule that they began
# with: a function (output, target) of a batch that returns a number, or (mean, weight). The rule of
# later runs is in own_metrics.py. `perplexity` is a function of the mean loss and has no sum: it is
# computed as exp(loss) where the parts are added.

Metric = Callable[[Any, Any, int], tuple[float, float]]
"""Computes (mean, weight) from (output, target, num_rows)."""

_IGNORED: Final = -100


def make_metrics(
    names: Iterable[str], entrypoints: EntryPoints, numerics: int = CURRENT
) -> dict[str, Metric]:
    """Return the metrics by name, except those that follow from the loss or need whole splits."""
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
    """Return (share of targets among the `num_best` best classes, number of targets); -100 is not
    counted."""
    if output.shape == target.shape:  # one logit each: yes or no
        hits, counted = (output > 0) == (target > 0.5), torch.ones_like(target, dtype=torch.bool)
    else:
        # Classes are the last dimension (tokens), or the second one as in torch's losses (images).
        dim = -1 if output.shape[:-1] == target.shape else 1
        best = output.topk(min(num_best, output.shape[dim]), dim=dim).indices
        hits, counted = (best == target.unsqueeze(dim)).any(dim), target != _IGNORED
    num_counted = int(counted.sum())
    return int((hits & counted).sum()) / max(num_counted, 1), num_counted


def _difference(output: Tensor, target: Tensor) -> Tensor:
    if output.shape != target.shape:
        raise ValueError(
            f"output has shape {tuple(output.shape)} but target has {tuple(target.shape)}"
        )
    return output.double() - target.double()


_METRICS: Final[Mapping[str, Metric]] = {
    "accuracy": lambda output, target, _: _top_accuracy(output, target, 1),
    "top5_accuracy": lambda output, target, _: _top_accuracy(output, target, 5),
    "mse": lambda output, target, rows: (_difference(output, target).square().mean().item(), rows),
    "mae": lambda output, target, rows: (_difference(output, target).abs().mean().item(), rows),
}


# ---- Evaluator ----

Batch = tuple[str, int]
"""A batch of an evaluation: (split, number)."""

_BATCH_SIZE: Final = 256


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """Sums over one batch: mean × weight of "loss" and each metric.

    A metric with a weight other than `weight` (such as tokens instead of rows) has "weight:<name>",
    too. kept: the batch for the user's own metrics, if there are any.
    """

    split: str
    batch: int
    weight: float
    sums: Mapping[str, float]
    kept: KeptBatch | None = field(default=None, compare=False, repr=False)


Begins = Callable[[int, int], None]
"""Called with (batch, number of remaining batches including it) before each batch; may raise to end
the evaluation."""


@dataclass(frozen=True, slots=True)
class EvaluationShare:
    """One member's part of an evaluation: every `size`-th batch, from number `rank` on."""

    splits: Sequence[str]
    rank: int
    size: int
    begins: Begins
    evaluated: dict[Batch, EvaluationPart]
    """Batches that were evaluated earlier and are not evaluated again."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates batches of a model by the job's loss and metrics."""

    model: nn.Module
    data: Mapping[str, Dataset]
    execution: ModelExecution
    randomness: KeyedRandomness
    gather: Gather
    objective: Objective
    metrics: Mapping[str, Metric]
    batch_size: int
    own: OwnMetrics | None = None
    """The user's own metrics, over whole splits; None without any."""

    @property
    def loss(self) -> LossFunction:
        """Computes the loss of an output, such as that of a pipeline's last stage."""
        assert isinstance(self.objective, OutputLoss)  # pipelines refuse other objectives
        return self.objective.loss

    def dataset(self, split: str) -> Dataset:
        """Return a split's rows. Raises InvalidInputError for evaluation.split if it is missing."""
        if split not in self.data:
            splits = ", ".join(self.data)
            raise InvalidInputError.at("evaluation.split", f'no split "{split}"; there is {splits}')
        return self.data[split]

    def num_batches(self, split: str) -> int:
        """Return the number of batches of a split; the last batch may be smaller."""
        return -(-len(self.dataset(split)) // self.batch_size)

    def rows_in(self, split: str, batch: int) -> int:
        """Return the number of rows in this batch of a split."""
        return min(self.batch_size, len(self.dataset(split)) - batch * self.batch_size)

    def share(self, splits: Sequence[str], first: int, size: int, count: int = 1) -> list[Batch]:
        """Return the batches whose number modulo size is one of `count` numbers from `first` on."""
        return [
            (split, batch)
            for split in splits
            for batch in range(self.num_batches(split))
            if (batch - first) % size < count
        ]

    def parts_of(self, share: EvaluationShare) -> list[EvaluationPart]:
        """Evaluate the missing batches of a share; return the sums of all its batches."""
        batches = self.share(share.splits, share.rank, share.size)
        pending = [batch for batch in batches if batch not in share.evaluated]
        self.expect(pending)
        for place, batch in enumerate(pending):
            share.begins(batch[1], len(pending) - place)
            share.evaluated[batch] = self.part(*batch)
        return [share.evaluated[batch] for batch in batches]

    @torch.no_grad()
    def part(
        self, split: str, batch: int, keep: Callable[[Any, int], None] | None = None
    ) -> EvaluationPart:
        """Evaluate one batch with the model in its present mode (train or eval). keep: called with
        the output and the number of rows."""
        wants_output = bool(self.metrics) or self.own is not None or keep is not None
        outcome, part = self._evaluated(split, batch, wants_output=wants_output)
        if self.randomness.has_failed():
            outcome, part = self._evaluated(split, batch, wants_output=wants_output)
        if keep is not None:
            keep(outcome.output, self.rows_in(split, batch))
        self.randomness.end()
        return part

    def _evaluated(
        self, split: str, batch: int, *, wants_output: bool
    ) -> tuple[Assessment, EvaluationPart]:
        self.execution.begin_batch(self.rows_in(split, batch))
        # In train mode a trial would fail at the first batch of most models.
        begin = self.randomness.begin if self.model.training else self.randomness.begin_trial
        begin("evaluate", split, batch)
        x, y, num_rows = self._gathered(split, batch)
        with user_code(f"evaluating {split}"):
            outcome = self.objective.evaluate(self.model, x, y, num_rows, wants_output=wants_output)
        return outcome, self._part(split, batch, outcome, num_rows)

    def begin(self, split: str, batch: int) -> Tensor:
        """Begin a batch by seeding its random numbers; return its row numbers."""
        self.execution.begin_batch(self.rows_in(split, batch))
        self.randomness.begin("evaluate", split, batch)
        return self._rows(split, batch)

    def load(self, split: str, batch: int) -> tuple[Any, Any, int]:
        """Seed a batch's random numbers and load its rows; return (x, y, number of rows)."""
        self.begin(split, batch)
        return self._gathered(split, batch)

    def _gathered(self, split: str, batch: int) -> tuple[Any, Any, int]:
        rows, activity = self._rows(split, batch), f"evaluating {split}"
        return *self.gather(self.dataset(split), rows, activity, _keys(split, batch)), len(rows)

    def expect(self, batches: Iterable[Batch]) -> None:
        """Announce the next batches, so that their rows may be read ahead."""
        self.gather.expect(
            (self.dataset(split), self._rows(split, batch), _keys(split, batch))
            for split, batch in batches
        )

    def _rows(self, split: str, batch: int) -> Tensor:
        start = batch * self.batch_size
        return torch.arange(start, start + self.rows_in(split, batch))

    def measure(self, split: str, batch: int, output: Any, y: Any, num_rows: int) -> EvaluationPart:
        """Compute loss and metrics of a batch from the model's output, and keep the batch for the
        user's own metrics."""
        with user_code(f"evaluating {split}"):
            outcome = Assessment(self.loss(output, y, num_rows), output, y)
        return self._part(split, batch, outcome, num_rows)

    def _part(self, split: str, batch: int, outcome: Assessment, num_rows: int) -> EvaluationPart:
        inputs, loss = None, outcome.loss
        with user_code(f"evaluating {split}"):
            sums = {"loss": float(loss.mean) * loss.weight}
            for name, metric in self.metrics.items():
                with noted(name, (outcome.output, outcome.target)):
                    mean, weight = metric(outcome.output, outcome.target, num_rows)
                sums[name] = mean * weight
                if weight != loss.weight:
                    sums[f"weight:{name}"] = weight
            if self.own is not None:
                num_all = len(self.dataset(split))
                inputs = self.own.keep(outcome.output, outcome.target, num_rows, num_all)
        if loss.weight == 0:  # nothing was counted, so the mean is arbitrary
            sums["loss"] = 0.0
        return EvaluationPart(split, batch, loss.weight, sums, inputs)


def _keys(split: str, batch: int) -> BatchKeys:
    return BatchKeys(("row", "evaluate", split), ("evaluate", split, batch))


def make_evaluator(  # noqa: PLR0913  (this function combines all of them)
    job: JobSpec,
    entrypoints: EntryPoints,
    model: nn.Module,
    data: Mapping[str, Dataset],
    execution: ModelExecution,
    randomness: KeyedRandomness,
    gather: Gather,
    numerics: int = CURRENT,
) -> Evaluator:
    """Make the evaluator of a job's model."""
    spec, objective = job.evaluation, make_objective(job, entrypoints)
    metrics = make_metrics(spec.metrics if spec else [], entrypoints, numerics)
    batch_size = spec.batch_size if spec else _BATCH_SIZE
    own_metrics = make_own_metrics(spec, entrypoints, numerics)
    return Evaluator(
        model, data, execution, randomness, gather, objective, metrics, batch_size, own_metrics
    )

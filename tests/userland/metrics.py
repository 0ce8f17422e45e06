"""Metrics of the user's own: functions of the outputs and targets of all rows, and an object."""

import torch
from torch import Tensor

from tests.userland.models import NUM_CLASSES


def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    """The mean over classes of F1: no mean over batches of anything."""
    guesses = outputs.argmax(1)
    scores = []
    for label in range(outputs.shape[1]):
        hits = int(((guesses == label) & (targets == label)).sum())
        count = int((guesses == label).sum() + (targets == label).sum())
        scores.append(2 * hits / max(count, 1))
    return sum(scores) / len(scores)


def extremes(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"least": outputs.min(), "most": outputs.max()}


def rank_sum(outputs: Tensor, targets: Tensor) -> float:
    """The sum of the ranks that the targets' outputs have among those of all rows."""
    own = outputs.gather(1, targets.unsqueeze(1)).squeeze(1)
    return float((own.argsort().argsort() * (targets + 1)).sum())


class Decaying:
    """A running number that depends on the order of its updates and on each bit of them."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def update(self, output: Tensor, target: Tensor) -> None:
        self.value = self.value * 0.7 + output.softmax(1).amax(1).sum() / len(target)

    def compute(self) -> Tensor:
        return self.value


def decaying() -> Decaying:
    return Decaying()


def with_weight(outputs: Tensor, targets: Tensor) -> tuple[float, int]:
    return 0.5, len(targets)


def best_class(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output.argmax(1), target


def agreement(guesses: Tensor, targets: Tensor) -> Tensor:
    return (guesses == targets).double().mean()


class ClassCounts:
    """Macro-F1 from counts by class: all of its state is added up."""

    summed_states = ("hits", "claims", "num_rows")

    def __init__(self) -> None:
        self.hits, self.claims = torch.zeros(2, NUM_CLASSES, dtype=torch.int64)
        self.num_rows = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        guesses = output.argmax(1)
        self.hits += torch.bincount(target[guesses == target], minlength=NUM_CLASSES)
        for each in (guesses, target):
            self.claims += torch.bincount(each, minlength=NUM_CLASSES)
        self.num_rows += len(target)

    def compute(self) -> dict[str, float]:
        scores = 2 * self.hits.double() / self.claims.clamp(min=1)
        return {"f1": float(scores.mean()), "rows": float(self.num_rows)}


class FewRows(ClassCounts):
    """Cannot be computed of many rows, and so not of the sums over clients."""

    def compute(self) -> dict[str, float]:
        if self.num_rows > 25:
            raise ValueError("too many rows: Smith, Anna")
        return super().compute()


class RowsAsShape:
    """Has a state of as many numbers as there were rows, so those of clients do not fit."""

    summed_states = ("seen",)

    def __init__(self) -> None:
        self.seen = torch.zeros(1)

    def update(self, output: Tensor, target: Tensor) -> None:
        self.seen = torch.zeros(len(self.seen) + len(target))

    def compute(self) -> float:
        return float(len(self.seen))


def dim_zero_sum(states: Tensor) -> Tensor:
    """What torchmetrics makes of dist_reduce_fx="sum"."""
    return states.sum(0)


class Confidence:
    """The mean of the largest probabilities, as a metric of torchmetrics keeps its states."""

    def __init__(self) -> None:
        self._defaults = {"total": torch.zeros(()), "count": torch.zeros((), dtype=torch.int64)}
        self._reductions = dict.fromkeys(self._defaults, dim_zero_sum)
        self.total, self.count = (each.clone() for each in self._defaults.values())

    def update(self, output: Tensor, target: Tensor) -> None:
        self.total = self.total + output.softmax(1).amax(1).sum()
        self.count = self.count + len(target)

    def compute(self) -> Tensor:
        return self.total / self.count


class KeptRows(Confidence):
    """Keeps its rows, as torchmetrics does for curves without thresholds."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []
        vars(self).update(_defaults={"rows": []}, _reductions={"rows": torch.cat})

    def update(self, output: Tensor, target: Tensor) -> None:
        self.rows.append(output)

    def compute(self) -> Tensor:
        return torch.cat(self.rows).mean()

"""The loops that the jobs of this folder replace: one process, whole batches, and no Stratagem."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = dict[str, Tensor]


class Rows(Protocol):
    """A data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...


def batches(
    rows: Rows, collate: Callable[[list[Any]], Batch], epochs: int, batch_size: int = 16
) -> Iterator[Batch]:
    """Yields the batches of some epochs, each shuffled from its number."""
    for epoch in range(epochs):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        for numbers in order.split(batch_size):
            yield collate([rows[number] for number in numbers.tolist()])


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: Optimizer,
    schedule: LRScheduler | None = None,
    clip_norm: float = float("inf"),
) -> Batch:
    """Trains a model that returns its loss; returns its state."""
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return model.state_dict()


def evaluate(model: nn.Module, batches: Iterable[Batch], metric: Any) -> float:
    """The value of a metric of torchmetrics over all batches."""
    model.eval()
    for batch in batches:
        with torch.inference_mode():
            metric.update(model(**batch).logits, batch["labels"])
    return float(metric.compute())

"""Forward and backward over rows of a data set: the one place where a model makes gradients.

Trainer, gossip node and federated client differ in what they do with gradients, not in how they
are made. Gradients are added to the parameters' `.grad`. Must not know shards, exchange and
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from stratagem.worker.data.datasets import Dataset, Gather
from stratagem.worker.engine.randomness import KeyedRandomness
from stratagem.worker.entrypoints import user_code
from stratagem.worker.losses import LossFunction


@dataclass(frozen=True, slots=True)
class Counted:
    """The mean loss of some rows, and its weight: the rows or tokens that it is a mean over."""

    loss: float
    weight: float


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a data set, and the words for errors in working on them."""

    dataset: Dataset
    indices: Tensor
    activity: str


@dataclass(frozen=True, slots=True)
class Passes:
    """A model with what it takes to compute its gradients. Used by one thread."""

    model: nn.Module
    loss: LossFunction
    gather: Gather
    randomness: KeyedRandomness

    def run(
        self,
        rows: Rows,
        key: tuple[int | str, ...],
        *,
        is_weighted: bool,
        before_backward: Callable[[], None] = lambda: None,
    ) -> Counted:
        """Adds the gradients of mean (is_weighted: of mean · weight) of these rows.

        key: names the computation; what is drawn at random depends on it alone.
        """
        self.randomness.begin(*key)
        x, y = self.gather(rows.dataset, rows.indices, rows.activity)
        with user_code(rows.activity):
            loss = self.loss(self.model(x), y, len(rows.indices))
        before_backward()
        with user_code(rows.activity):
            root = loss.mean * loss.weight if is_weighted else loss.mean
            root.backward()  # type: ignore[no-untyped-call]
        return Counted(float(loss.mean.detach()), float(loss.weight))

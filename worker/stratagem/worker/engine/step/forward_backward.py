"""Forward and backward over rows of a data set: the one place where a model makes gradients.

Trainer, gossip node and federated client differ in what they do with gradients, not in how they
are made. Gradients of micro-batches are added to the parameters' `.grad` in order, in place: where
that is part of a flat bucket, they add up there. Must not know shards, exchange and optimizer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from stratagem.common.numerics.keys import Key
from stratagem.worker.data.datasets import Coming, Dataset, Gather, TensorDataset
from stratagem.worker.data.row_datasets import BatchKeys
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.engine.numerics.prepare_model import ModelExecution
from stratagem.worker.engine.objectives.losses import LossValue
from stratagem.worker.engine.objectives.objective import Objective
from stratagem.worker.engine.step.autograd_errors import raise_with_names
from stratagem.worker.engine.step.backward_pass import run_backward
from stratagem.worker.engine.step.logged_sums import LoggedSums, sums_of
from stratagem.worker.host.thread_activity import per_thread
from stratagem.worker.models.model_tensors import refuse_sparse_gradients
from stratagem.worker.user_code.entrypoints import user_code


@dataclass(frozen=True, slots=True)
class Counted:
    """The loss over some rows: Σ mean loss · weight, and the weight, in rows or tokens."""

    loss_sum: float
    weight: float
    logged: LoggedSums = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean loss; the sum where nothing was counted, so that what is not finite stays so."""
        return self.loss_sum / self.weight if self.weight else self.loss_sum


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a data set, the words for errors in working on them, and the key that their
    random numbers have in this epoch."""

    dataset: Dataset
    indices: Tensor
    activity: str
    key: Key


@dataclass(frozen=True, slots=True)
class Window:
    """The micro-batches that one share of a step is computed in.

    cuts: places in the rows, in order. key: names micro-batch number m of it; what is drawn at
    random depends on that alone. before: called with m before micro-batch m; before_backward with
    the weight so far between its forward and its backward pass.
    """

    cuts: Sequence[range]
    key: Callable[[int], Key]
    before: Callable[[int], None] = lambda _: None
    before_backward: Callable[[float], None] = lambda _: None


def part(rows: Tensor, cut: range) -> Tensor:
    """rows[cut], which is often all of them: to look is quicker than to slice."""
    return rows if len(cut) == rows.shape[0] else rows[cut.start : cut.stop]


def micro_batches(rows: Rows, cuts: Sequence[range], key: Callable[[int], Key]) -> Iterator[Coming]:
    """The micro-batches of some rows, as they will be read."""
    for number, cut in enumerate(cuts):
        yield rows.dataset, part(rows.indices, cut), BatchKeys(rows.key, key(number))


@dataclass(slots=True)
class Start:
    """The gradient that backward begins with: a weight, which is mostly that of the step before."""

    latest: Tensor | None = None
    weight: float = 0.0
    is_first: bool = True
    """Whether no backward pass has begun with it."""

    def of(self, mean: Tensor, weight: float) -> Tensor:
        """0-d, like the mean loss."""
        latest = self.latest
        if (
            latest is None
            or weight != self.weight
            or latest._version  # the user's backward wrote into it
            or latest.dtype != mean.dtype
            or latest.device != mean.device
        ):
            latest = self.latest = mean.new_full((), weight)
            self.weight = weight
        return latest


@dataclass(frozen=True, slots=True)
class Passes:
    """A model with what it takes to compute its gradients. Used by one thread.

    A window is one transaction: an error in any micro-batch ends it, and the owner of the
    gradients drops them all. So does the end of a plan that nobody wants, between two of them.
    """

    model: nn.Module
    objective: Objective
    gather: Gather
    randomness: KeyedRandomness
    execution: ModelExecution
    start: Start = field(default_factory=Start)
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """The time of the forward and the backward pass of a micro-batch."""

    def add_sums(self, rows: Rows, window: Window) -> Counted:
        """Adds the gradient of mean · weight · scale of each micro-batch to `.grad`, in order."""
        return self._run(rows, window, is_weighted=True)

    def add_mean(self, rows: Rows, window: Window, *, must_divide: bool) -> Counted:
        """Makes `.grad` (None before) the gradient of the mean over the whole window, or of the
        sum. One micro-batch's mean is differentiated as it is; several are added up weighted and
        divided once."""
        is_weighted = len(window.cuts) > 1 or not must_divide
        counted = self._run(rows, window, is_weighted=is_weighted)
        if is_weighted and must_divide and counted.weight:
            grads = [param.grad for param in self.model.parameters() if param.grad is not None]
            for grad in grads:
                grad.div_(counted.weight)
        self.execution.scale.unscale(self.model.parameters())
        return counted

    def _run(self, rows: Rows, window: Window, *, is_weighted: bool) -> Counted:
        is_users = self.objective.is_users or not isinstance(rows.dataset, TensorDataset)
        values: list[LossValue] = []
        weight, here = 0.0, per_thread.activity

        def weigh(own: float) -> None:
            nonlocal weight
            weight += own
            window.before_backward(weight)

        for number, cut in enumerate(window.cuts):
            if number:
                here.check()
            window.before(number)
            key = window.key(number)
            self.randomness.begin(*key, is_users=is_users)
            own = replace(rows, indices=part(rows.indices, cut))
            values.append(self._run_one(own, BatchKeys(rows.key, key), weigh, is_weighted))
        # Read at the end, so that a device need not wait for us between micro-batches.
        loss_sum = 0.0
        for value in values:
            loss_sum += value.mean.item() * value.weight
        logged = sums_of(values) if self.objective.may_log else {}
        return Counted(loss_sum, weight, logged)

    def _run_one(
        self,
        rows: Rows,
        keys: BatchKeys,
        before_backward: Callable[[float], None],
        is_weighted: bool,
    ) -> LossValue:
        """Forward and backward of one micro-batch; its loss, as plain numbers."""
        x, y = self.gather(rows.dataset, rows.indices, rows.activity, keys)
        with self.around():
            return self._pass(rows, x, y, before_backward, is_weighted)

    def _pass(
        self,
        rows: Rows,
        x: Any,
        y: Any,
        before_backward: Callable[[float], None],
        is_weighted: bool,
    ) -> LossValue:
        with user_code(rows.activity):
            loss = self.objective(self.model, x, y, rows.indices.shape[0])
        before_backward(float(loss.weight))
        if loss.weight == 0 and not loss.mean.requires_grad:  # nothing was counted
            return loss
        with user_code(rows.activity):
            root, mean = self.execution.scale.up(loss.mean), loss.mean
            # The bits of the gradient of mean · weight, without the two products.
            begin = self.start.of(mean, loss.weight) if is_weighted else None
            try:
                run_backward(root, begin)
            except RuntimeError as error:
                raise_with_names(error, [root], self.model.named_parameters())
        if self.start.is_first:  # to look at each is not for every pass
            refuse_sparse_gradients(list(self.model.named_parameters()))
            self.start.is_first = False
        return LossValue(loss.mean.detach(), float(loss.weight), loss.log)

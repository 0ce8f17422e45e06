"""The step that joins replicas: what they have learned is one step of the outer optimizer.

g = mean over the replicas of (common parameters - own parameters), added in the fixed tree and
divided once; buf <- momentum * buf + g; common <- common - lr * (g + momentum * buf); every replica
goes on from there. Buffers of the model are averaged as they are over shards. What travels besides
are sums over the steps since the last join. Knows no members and no coordinator.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import UserCodeError
from stratagem.common.strategy import DataParallel, MeanOfReplicas, OuterOptimizer
from stratagem.worker.engine.apart.local_model import LocalModel, LocalSums
from stratagem.worker.engine.optim.finite_gradients import are_finite
from stratagem.worker.engine.step.logged_sums import NUM_EXTRAS, LoggedSums, added, packed, unpacked
from stratagem.worker.engine.step.model_buffers import Buffers
from stratagem.worker.engine.trainers.trainer_setup import Setup
from stratagem.worker.exchange.buckets.bucket_layout import BUCKET_BYTES, CODED_BUCKET_BYTES
from stratagem.worker.exchange.buckets.gradient_buckets import GradientBuckets
from stratagem.worker.exchange.buckets.gradient_norm import parts_of, total_norm
from stratagem.worker.exchange.buckets.step_scalars import StepScalars, num_scalars
from stratagem.worker.exchange.coded.gradient_compressor import compressor_of
from stratagem.worker.exchange.reducer import GradientReducer

OUTER: Final = "outer/"
"""What the names of the outer optimizer's tensors begin with."""
_MOMENTUM: Final = "momentum_buffer"


class JoinReport(NamedTuple):
    """What all members know after a join."""

    loss: float
    """Mean over all rows since the last join; NaN where nothing was learned."""
    grad_norm: float
    """2-norm of the outer gradient."""
    wait_s: float


@dataclass(slots=True)
class JoinedSums:
    """Sums over all replicas since a segment began; alike on all members."""

    weight: float = 0.0
    loss: float = 0.0
    num_skipped: int = 0
    max_grad_norm: float = 0.0
    logged: LoggedSums = field(default_factory=dict)
    outer_grad_norm: float = 0.0
    """Of the newest join."""


class OuterStep:
    """Joins the replicas of this member with those of the others. Used by one thread."""

    def __init__(self, setup: Setup, replicas: Mapping[int, LocalModel]) -> None:
        """setup.model is what all replicas have in common; replicas: by number, in order."""
        strategy, device = setup.job.strategy, setup.gather.device
        assert isinstance(strategy, DataParallel)
        self._setup, self._replicas = setup, replicas
        self._num_replicas = strategy.num_replicas
        self._named = [(n, p) for n, p in setup.model.named_parameters() if p.requires_grad]
        self._params = [param for _, param in self._named]
        self._optimizer = _optimizer(strategy.options.outer_optimizer, self._params)
        self._buffers = Buffers(setup.model, device)
        self._own_buffers = {n: Buffers(each.model, device) for n, each in replicas.items()}
        self._num_logged = NUM_EXTRAS if setup.objective.may_log else 0
        num_rest = self._buffers.num_elements + 3 + self._num_replicas + self._num_logged
        num_extras = num_scalars(len(self._named), num_rest)
        self.compressor = compressor_of(
            setup.job, self._named, num_extras, absorbs=False, numerics=setup.numerics
        )
        bucket_bytes = BUCKET_BYTES if self.compressor is None else CODED_BUCKET_BYTES
        self.buckets = GradientBuckets(
            self._named, num_extras=num_extras, bucket_bytes=bucket_bytes
        )
        self._sums = JoinedSums()

    def take_sums(self) -> JoinedSums:
        """Returns the sums since this was last asked."""
        sums, self._sums = self._sums, JoinedSums()
        return sums

    def run(self, exchange: GradientReducer, step: int) -> JoinReport:
        """Joins all replicas after so many steps. After an error they are not to be used."""
        owned = exchange.party.owned
        exchange.begin_step(step, owned, self._num_replicas, divisor=float(self._num_replicas))
        for number, replica in self._replicas.items():
            exchange.begin_shard(number)
            if self.compressor is not None:
                self.compressor.weigh(number, 1.0)
            self.buckets.fill(self._moved(replica))
            exchange.end_shard(number, self._scalars(number, replica.sums))
        waits_since_s = time.perf_counter()
        sums = exchange.finish()
        wait_s = time.perf_counter() - waits_since_s
        norm = self._update(step, is_spoiled=sums.is_spoiled)
        if self.compressor is not None:
            self.compressor.applied()
        self._buffers.apply(sums.rest, self._num_replicas)
        loss = self._add(sums, norm)
        self._go_on()
        return JoinReport(loss, norm, wait_s)

    def _moved(self, replica: LocalModel) -> Iterator[Tensor]:
        """Yields by how much each parameter is less than the common one, as it is summed."""
        layout = self.buckets.layout
        for slot, common, own in zip(layout.slots, self._params, replica.tensors, strict=True):
            dtype = layout.buckets[slot.bucket].dtype
            yield common.detach().to(dtype) - own.to(dtype)

    def _scalars(self, number: int, own: LocalSums) -> StepScalars:
        changes = self._own_buffers[number].contribution(number, self._num_replicas)
        numbers = torch.zeros(3 + self._num_replicas, dtype=torch.float64)
        numbers[:3] = torch.tensor([own.weight, own.loss, own.num_skipped], dtype=torch.float64)
        numbers[3 + number] = own.grad_norm
        logged = [packed(own.logged)] if self._num_logged else []
        rest = torch.cat([changes, numbers, *logged])
        # Each replica counts alike, whatever rows it has had: the weight of a shard is that of what
        # is exchanged.
        return StepScalars(1.0, 0.0, 0.0, [1.0] * len(self._params), rest)

    def _update(self, step: int, *, is_spoiled: bool) -> float:
        """Makes one step of the outer optimizer; returns the 2-norm of its gradient."""
        gradients = [param.grad for param in self._params if param.grad is not None]
        norm = total_norm(parts_of(gradients, self._setup.numerics), self._setup.numerics)
        if is_spoiled or not are_finite(norm, gradients):
            text = f"non-finite outer gradient after step {step}: a replica has diverged"
            raise UserCodeError("FloatingPointError", text, activity=f"training step {step}")
        self._optimizer.step()
        for param in self._params:
            param.grad = None
        return norm.item()

    @torch.no_grad()
    def _go_on(self) -> None:
        """Has all replicas go on from what they have in common."""
        self._buffers.snapshot()
        for number, replica in self._replicas.items():
            for own, common in zip(replica.tensors, self._params, strict=True):
                own.copy_(common)
            self._own_buffers[number].take_over(self._buffers)
            replica.sums = LocalSums()

    def _add(self, sums: StepScalars, norm: float) -> float:
        """Adds what was joined to the sums; returns the mean loss since the join before."""
        so_far, first = self._sums, self._buffers.num_elements
        last = first + 3 + self._num_replicas
        weight, loss, num_skipped, *norms = sums.rest[first:last].tolist()
        so_far.weight += weight
        so_far.loss += loss
        so_far.num_skipped += round(num_skipped)
        so_far.max_grad_norm = max(so_far.max_grad_norm, *norms)
        so_far.outer_grad_norm = norm
        if self._num_logged:
            own = next((each.sums.logged for each in self._replicas.values()), {})
            total = unpacked(sums.rest[last:], tuple(own) or None)
            so_far.logged = added(so_far.logged, total)
        return loss / weight if weight else math.nan

    def state(self) -> dict[str, Tensor]:
        """Returns the outer optimizer's tensors; empty before the first join."""
        found: dict[str, Tensor] = {}
        for name, param in self._named:
            buffer = self._optimizer.state.get(param, {}).get(_MOMENTUM)
            if buffer is not None:
                found[f"{OUTER}{name}/{_MOMENTUM}"] = buffer.detach()
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave, or begins without; the common model is loaded already."""
        self._optimizer.state.clear()
        for name, param in self._named:
            buffer = tensors.get(f"{OUTER}{name}/{_MOMENTUM}")
            if buffer is not None:
                kept = torch.empty_like(param, memory_format=torch.preserve_format).copy_(buffer)
                self._optimizer.state[param] = {_MOMENTUM: kept.detach()}
        self._buffers.snapshot()
        for own in self._own_buffers.values():
            own.snapshot()
        self._sums = JoinedSums()


def _optimizer(outer: OuterOptimizer, params: list[nn.Parameter]) -> torch.optim.SGD:
    if isinstance(outer, MeanOfReplicas):
        return torch.optim.SGD(params, lr=1.0, foreach=False)
    momentum = outer.momentum
    return torch.optim.SGD(
        params, lr=outer.lr, momentum=momentum, nesterov=momentum > 0, foreach=False
    )

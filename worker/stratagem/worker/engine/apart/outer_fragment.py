"""One fragment of the outer step: some parameters, from what replicas have moved to the update.

g = mean over the replicas of (common parameters - own parameters), added in the fixed tree and
divided once; buf <- momentum * buf + g; common <- common - lr * (g + momentum * buf); replicas go
on from mix * own + (1 - mix) * common. Between the cut, where g is taken, and its application
replicas may go on. Knows no members, no schedule and no coordinator.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import UserCodeError
from stratagem.common.strategy import DataParallel, MeanOfReplicas, OuterOptimizer
from stratagem.worker.engine.apart.local_model import LocalModel
from stratagem.worker.engine.optim.finite_gradients import are_finite
from stratagem.worker.engine.optim.optimizers import update
from stratagem.worker.engine.trainers.trainer_setup import Setup
from stratagem.worker.exchange.buckets.bucket_layout import BUCKET_BYTES, CODED_BUCKET_BYTES
from stratagem.worker.exchange.buckets.gradient_buckets import GradientBuckets
from stratagem.worker.exchange.buckets.gradient_norm import parts_of, total_norm
from stratagem.worker.exchange.buckets.step_scalars import StepScalars, num_scalars
from stratagem.worker.exchange.coded.gradient_compressor import compressor_of
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.user_code.entrypoints import user_code

OUTER: Final = "outer/"
"""What the names of the outer optimizer's tensors begin with."""
IN_FLIGHT: Final = "inflight/"
"""What the names of a sum that is not applied yet begin with."""
_SCALARS: Final = f"{IN_FLIGHT}scalars"
_MOMENTUM: Final = "momentum_buffer"


class OuterFragment:
    """The parameters at these places of the trained ones. Used by one thread."""

    def __init__(
        self, setup: Setup, replicas: Mapping[int, LocalModel], places: range, num_rest: int
    ) -> None:
        """setup.model is what all replicas have in common; replicas: by number, in order. num_rest:
        further numbers that travel with the fragment."""
        strategy = setup.job.strategy
        assert isinstance(strategy, DataParallel)
        self._setup, self._replicas, self._places = setup, replicas, places
        self._num_replicas, self._mix = strategy.num_replicas, strategy.options.mixed_share
        trained = [(n, p) for n, p in setup.model.named_parameters() if p.requires_grad]
        self._named = trained[places.start : places.stop]
        self._params = [param for _, param in self._named]
        self._optimizer = _optimizer(strategy.options.outer_optimizer, self._params)
        num_extras = num_scalars(len(self._named), num_rest)
        self.compressor = compressor_of(
            setup.job, self._named, num_extras, absorbs=False, numerics=setup.numerics
        )
        bucket_bytes = BUCKET_BYTES if self.compressor is None else CODED_BUCKET_BYTES
        self.buckets = GradientBuckets(
            self._named, num_extras=num_extras, bucket_bytes=bucket_bytes
        )
        self._under_way: GradientReducer | None = None
        self.sums: StepScalars | None = None
        """Those of all replicas, from their arrival to the update."""
        self.norm = 0.0
        """2-norm of the newest outer gradient."""
        self.drifts: dict[int, float] = {}
        """By own replica: 2-norm of what it had moved at the newest cut."""

    @property
    def is_in_flight(self) -> bool:
        """True from the cut to the update."""
        return self._under_way is not None or self.sums is not None

    def cut(self, exchange: GradientReducer, step: int, rest: Mapping[int, Tensor]) -> None:
        """Takes what the replicas have moved up to this step and starts to sum it; rest: by
        replica."""
        count = self._num_replicas
        exchange.begin_step(step, exchange.party.owned, count, divisor=float(count))
        for number, replica in self._replicas.items():
            exchange.begin_shard(number)
            if self.compressor is not None:
                self.compressor.weigh(number, 1.0)
            parts: list[Tensor] = []
            self.buckets.fill(self._moved(replica, parts))
            self.drifts[number] = total_norm(parts, self._setup.numerics).item()
            # Each replica counts alike, whatever rows it has had.
            scalars = StepScalars(1.0, 0.0, 0.0, [1.0] * len(self._params), rest[number])
            exchange.end_shard(number, scalars)
        self._under_way = exchange

    def _own(self, replica: LocalModel) -> Sequence[Tensor]:
        return replica.tensors[self._places.start : self._places.stop]

    def _moved(self, replica: LocalModel, parts: list[Tensor]) -> Iterator[Tensor]:
        """Yields by how much each parameter is less than the common one, as it is summed. parts:
        gets those of the norm of all of it."""
        layout = self.buckets.layout
        for slot, common, own in zip(layout.slots, self._params, self._own(replica), strict=True):
            dtype = layout.buckets[slot.bucket].dtype
            moved = common.detach().to(dtype) - own.to(dtype)
            parts += parts_of([moved], self._setup.numerics)
            yield moved

    def arrive(self, step: int) -> float:
        """Waits for the sums, if they are under way; returns for how many seconds. Raises
        UserCodeError where they are not finite."""
        if self._under_way is None:
            return 0.0
        waits_since_s = time.perf_counter()
        sums = self._under_way.finish()
        wait_s = time.perf_counter() - waits_since_s
        self._under_way = None
        if self.compressor is not None:
            self.compressor.applied()
        self._take(sums, step)
        return wait_s

    def _take(self, sums: StepScalars, step: int) -> None:
        gradients = [param.grad for param in self._params if param.grad is not None]
        norm = total_norm(parts_of(gradients, self._setup.numerics), self._setup.numerics)
        if sums.is_spoiled or not are_finite(norm, gradients):
            text = f"non-finite outer gradient after step {step}: a replica has diverged"
            raise UserCodeError("FloatingPointError", text, activity=f"training step {step}")
        self.sums, self.norm = sums, norm.item()

    @torch.no_grad()
    def apply(self) -> None:
        """Makes one step of the outer optimizer with the sums that have arrived. Raises
        UserCodeError."""
        with user_code("the outer step"):  # which refuses a rate that its numbers cannot hold
            update(self._optimizer)
        self.sums = None
        for param in self._params:
            param.grad = None
        for replica in self._replicas.values():
            for own, common in zip(self._own(replica), self._params, strict=True):
                if self._mix:
                    own.mul_(self._mix).add_(common, alpha=1.0 - self._mix)
                else:
                    own.copy_(common)

    def state(self) -> dict[str, Tensor]:
        """Returns the optimizer's tensors, none before the first update, and sums that have arrived
        and are not applied yet."""
        found: dict[str, Tensor] = {}
        for name, param in self._named:
            buffer = self._optimizer.state.get(param, {}).get(_MOMENTUM)
            if buffer is not None:
                found[f"{OUTER}{name}/{_MOMENTUM}"] = buffer.detach()
            if self.sums is not None and param.grad is not None:
                found[f"{IN_FLIGHT}{name}"] = param.grad
        if self.sums is not None:
            found[_SCALARS] = self.sums.flat()
        return found

    def load(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Takes over what `state` gave, or begins without."""
        self._optimizer.state.clear()
        self._under_way = self.sums = None
        for name, param in self._named:
            param.grad = _copied(tensors.get(f"{IN_FLIGHT}{name}"), param)
            buffer = _copied(tensors.get(f"{OUTER}{name}/{_MOMENTUM}"), param)
            if buffer is not None:
                self._optimizer.state[param] = {_MOMENTUM: buffer}
        if all(f"{IN_FLIGHT}{name}" in tensors for name, _ in self._named):
            self._take(StepScalars.of(tensors[_SCALARS].clone(), len(self._named)), step)


def _copied(tensor: Tensor | None, param: nn.Parameter) -> Tensor | None:
    if tensor is None:
        return None
    return torch.empty_like(param, memory_format=torch.preserve_format).detach().copy_(tensor)


def _optimizer(outer: OuterOptimizer, params: list[nn.Parameter]) -> torch.optim.SGD:
    if isinstance(outer, MeanOfReplicas):
        return torch.optim.SGD(params, lr=1.0, foreach=False)
    momentum = outer.momentum
    return torch.optim.SGD(
        params, lr=outer.lr, momentum=momentum, nesterov=momentum > 0, foreach=False
    )

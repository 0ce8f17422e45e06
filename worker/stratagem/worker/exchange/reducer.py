"""Reduce one training step's gradients from shards to the sum over all shards.

The sum has the same bits whichever member computes a shard and by any transport: shards are added
in the tree of `common.numerics.shards`, each slot in its fixed place. Reduction overlaps with
backward: while the last own shard runs, the transport gets each bucket when it is full, in order;
with a codec, when the buckets that are coded together are full and coded. Used by one thread; only
`cut` may be called from another one. The module knows neither model nor optimizer.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.exchange.all_reduce import DirectMethod
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.coded_gather import PayloadMethod, pays_off
from stratagem.worker.exchange.compressor import Compressor
from stratagem.worker.exchange.layout import (
    BLOCK,
    FewGradients,
    ShardOwners,
    StepPlan,
    divided,
    parts_of,
    plan_step,
)
from stratagem.worker.exchange.parameter_server import CodedFreight, ServerTransport
from stratagem.worker.exchange.shm_all_reduce import SharedTransport
from stratagem.worker.exchange.slices import SliceExchange
from stratagem.worker.exchange.transfer_thread import MeshTransport, Method
from stratagem.worker.exchange.transports import (
    ParameterTransport,
    ReductionTransport,
    SoloTransport,
    StepScalars,
)
from stratagem.worker.exchange.unordered import NativeMethod, RingMethod
from stratagem.worker.mesh.link import CollectiveLink, ExchangeError, Link
from stratagem.worker.mesh.shm import SharedGroup
from stratagem.worker.mesh.staging import SideStream

# ---- Single member without peers ----
#
# A member with no peers and only one shard has the sums already. Its gradients stay where autograd
# puts them. Large ones are divided and measured while they are in the cache, as backward finishes
# each, and small ones all at once in the end. The bits are those of the buckets.

_AS_SUMMED: Final = (torch.float32, torch.float64)
"""Gradient types that are summed without conversion; narrower ones are summed in wider storage."""
SMALL_BYTES: Final = 1 << 20
"""Total size of gradients that fit into a core's cache, where call overhead exceeds memory time."""


class SingleMemberReducer:
    """Reducer of a lone member, which divides and measures gradients in place, without buckets;
    `fits` must be true. A step makes the same calls as with `GradientReducer`."""

    name: Final = "solo"
    shares_memory: Final = False
    slices: Final = None
    parameters: Final = None
    """None: there are no other members with parameters."""

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]], numerics: int = CURRENT) -> None:
        self._names, self._params = [name for name, _ in params], [param for _, param in params]
        self._numerics = numerics
        self._divisor: float | None = None
        self._num_to_come = 0
        self._is_last = self._is_divided = self._is_cut = False
        self._norms: list[Tensor | None] = []
        self._scalars: StepScalars | None = None
        self._small = _smallest(self._params)
        self._few = FewGradients([self._params[index].shape for index in self._small])
        self._large = [index for index in range(len(params)) if index not in set(self._small)]
        self._hooks = [
            self._params[index].register_post_accumulate_grad_hook(self._make_hook(index))
            for index in self._large
        ]

    @staticmethod
    def fits(params: Sequence[tuple[str, nn.Parameter]]) -> bool:
        """Return whether gradients have the same bits without buckets: float32 or float64, and
        contiguous."""
        return all(p.dtype in _AS_SUMMED and p.is_contiguous() for _, p in params)

    def begin_step(
        self, step: int, owned: range, num_live: int, *, divisor: float | None = None
    ) -> None:
        """Start a step, whose only shard has rows; arguments as in `GradientReducer.begin_step`."""
        if owned != range(1) or num_live != 1:
            raise ValueError(f"one shard is owned here, not {owned} of {num_live}")
        self._divisor, self._scalars, self._is_divided = divisor, None, False

    def begin_shard(self, shard: int, *, num_micro_batches: int = 1) -> None:
        """Begin the shard; the next backward is its first."""
        self._num_to_come = num_micro_batches - 1
        self._norms = [None] * len(self._params)
        for param in self._params:
            param.grad = None
        self._is_last = self._num_to_come == 0

    def next_micro_batch(self) -> None:
        """Let the next backward add to the present shard."""
        if self._num_to_come < 1:
            raise RuntimeError("the shard has no further micro-batch")
        self._num_to_come -= 1
        self._is_last = self._num_to_come == 0

    def weigh(self, weight: float) -> None:
        """Set the divisor of the sums, required before the last backward."""
        self._divisor = weight

    def reached(self) -> list[bool]:
        """Return for each parameter whether backward has reached it in the present shard."""
        return [param.grad is not None for param in self._params]

    def end_shard(self, shard: int, scalars: StepScalars) -> None:
        """Finish the shard, whose micro-batches must all be done, and keep its scalars."""
        if self._num_to_come:
            raise RuntimeError(f"{self._num_to_come} micro-batches are still to be computed")
        self._is_last, self._scalars = False, scalars

    def finish(self) -> StepScalars:
        """Divide the gradients that are not divided yet and return the scalars unchanged. Raises
        ExchangeError after cut."""
        if self._is_cut:
            raise ExchangeError("the exchange was cut")
        if self._scalars is None:
            raise RuntimeError("the shard is still to be computed")
        if self._divisor is not None:
            self.divide(self._divisor)
        return self._scalars

    def divide(self, divisor: float) -> None:
        """Divide the gradients that the last backward did not divide."""
        if self._is_divided:
            return
        self._is_divided = True
        small = [grad for grad in self._small_gradients() if grad is not None]
        if small:
            torch._foreach_div_(small, divisor)  # on the CPU the same calls, from C++
        for index in self._large:
            grad = self._params[index].grad
            if grad is not None and self._norms[index] is None:
                self._norms[index] = divided(grad, divisor, self._numerics)

    def norms(self) -> list[Tensor]:
        """Return the result of `layout.parts_of` for the gradients that exist."""
        small = self._few.parts(self._small_gradients(), self._numerics)
        if not self._large:
            return small
        there = [index for index in self._small if self._params[index].grad is not None]
        for index, norm in zip(there, small, strict=True):
            self._norms[index] = norm
        for index in self._large:
            grad = self._params[index].grad
            if grad is not None and self._norms[index] is None:
                (self._norms[index],) = parts_of([grad], self._numerics)
        return [norm for norm in self._norms if norm is not None]

    def _small_gradients(self) -> list[Tensor | None]:
        return [self._params[index].grad for index in self._small]

    def discard(self) -> None:
        """Abandon the step: drop its gradients."""
        self._is_last = False
        for param in self._params:
            param.grad = None

    def free_gradients(self) -> None:
        """Free the gradients' storage after the update."""
        self.discard()

    def cut(self) -> None:
        """Make `finish` raise. May be called from any thread."""
        self._is_cut = True

    def close(self) -> None:
        """Remove the hooks, so that gradients are no longer changed."""
        for hook in self._hooks:
            hook.remove()

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            if not self._is_last or self._divisor is None:
                return
            if self._norms[index] is not None:
                raise RuntimeError(
                    f"parameter {self._names[index]} got a gradient again after it was divided: "
                    "a micro-batch is one backward, without re-entrant checkpointing"
                )
            assert param.grad is not None
            self._norms[index] = divided(param.grad, self._divisor, self._numerics)

        return hook


def _smallest(params: Sequence[nn.Parameter]) -> list[int]:
    """Return the indices of the smallest parameters whose gradients fit into the cache together;
    none on other devices than the CPU."""
    if any(param.device.type != "cpu" for param in params):
        return []
    order = sorted(range(len(params)), key=lambda index: params[index].nbytes)
    totals = accumulate(params[index].nbytes for index in order)
    return sorted(
        index
        for index, total in zip(order, totals, strict=True)
        if total <= SMALL_BYTES and params[index].numel() <= BLOCK
    )


# ---- Reducer for several members or shards ----


class GradientReducer:
    """Sums gradients over the members of one membership. A failed exchange stays failed."""

    def __init__(
        self,
        buckets: GradientBuckets,
        party: ShardOwners,
        transport: ReductionTransport,
        compressor: Compressor | None = None,
        slices: SliceExchange | None = None,
        parameters: ParameterTransport | None = None,
    ) -> None:
        """Take over the transport. compressor: encodes each shard before it is added. slices: given
        if sums stay with the owners of slices. parameters: given if these stay, too."""
        self.buckets, self.party, self.transport = buckets, party, transport
        self.slices, self.parameters = slices, parameters
        self._compressor = compressor
        self._portions = compressor.portions(buckets.layout) if compressor else []
        self._num_coded = 0  # portions of the present shard
        buckets.hold()
        self._steps: dict[int, StepPlan] = {}
        self._step: StepPlan | None = None
        self._num_done = 0  # own live shards
        self._num_to_come = 0  # further micro-batches of the present shard
        self._full = [False] * len(buckets.layout.buckets)
        self._next_bucket = 0

    @property
    def name(self) -> str:
        codec = f", {self._compressor.name}" if self._compressor else ""
        return f"{self.transport.name}{codec}"

    @property
    def shares_memory(self) -> bool:
        return self.transport.name == SharedGroup.name

    def begin_step(
        self, step: int, owned: range, num_live: int, *, divisor: float | None = None
    ) -> None:
        """Start step number `step`; only the first num_live shards have rows and take part.

        divisor: the total weight, if all members know it in advance; the sums then arrive divided,
        with the same bits as a later division but less memory traffic. Extras are never divided.
        """
        if owned != self.party.owned:
            raise ValueError(f"member {self.party.rank} owns {self.party.owned}, not {owned}")
        if num_live not in self._steps:
            self._steps[num_live] = plan_step(self.party, num_live)
        self._step = plan = self._steps[num_live]
        self._num_done, self._next_bucket = 0, 0
        self._full = [not plan.live] * len(self._full)
        if self._compressor is not None:
            self._compressor.begin_step(step, owned)
        sets = [self.buckets.tensors(index) for index in range(max([0, *plan.sets]) + 1)]
        self.transport.begin(step, plan, sets, divisor)
        self._launch()

    def begin_shard(self, shard: int, *, num_micro_batches: int = 1) -> None:
        """Begin a shard; the next backward is its first. Own live shards come in ascending order.

        Further micro-batches are announced by `next_micro_batch`. Buckets are launched only during
        the last backward of the last shard, in one exchange.
        """
        plan = self._current()
        if plan.live[self._num_done : self._num_done + 1] != range(shard, shard + 1):
            raise ValueError(f"shard {shard} is not the next of {plan.live}")
        self._num_to_come = num_micro_batches - 1
        self._num_coded = 0
        self.buckets.begin(plan.sets[self._num_done], self._on_full(plan))

    def next_micro_batch(self) -> None:
        """Let the next backward add to the present shard."""
        if self._num_to_come < 1:
            raise RuntimeError("the shard has no further micro-batch")
        self._num_to_come -= 1
        self.buckets.go_on(self._on_full(self._current()))

    def reached(self) -> list[bool]:
        """Return for each parameter whether backward has reached it in the present shard."""
        return self.buckets.reached()

    def weigh(self, weight: float) -> None:
        """Do nothing: one shard's weight does not determine the divisor of the step."""

    def divide(self, divisor: float) -> None:
        """Divide the sums after finish, if the divisor was not known in advance."""
        (self.buckets if self.slices is None else self.slices).divide(divisor)

    def norms(self) -> list[Tensor] | None:
        """Return None: this reducer does not know the norms of the summed gradients."""
        return None

    def discard(self) -> None:
        """Abandon the step: drop its gradients."""
        self._step = None
        self.buckets.discard()

    def end_shard(self, shard: int, scalars: StepScalars) -> None:
        """Finish the current shard: submit the gradients that backward has not produced as zeros,
        and add the shard's scalars to the reduction."""
        plan = self._current()
        if self._num_to_come:
            raise RuntimeError(f"{self._num_to_come} micro-batches are still to be computed")
        own_set, flat = plan.sets[self._num_done], scalars.flat()
        self.buckets.end(own_set, flat, self._next_bucket)
        if self._compressor is not None:
            while self._num_coded < len(self._portions):
                self._code_next(self._compressor)
            self._compressor.end(shard, flat)
            self.buckets.tensors(own_set)[-1].copy_(flat)
        self._num_done += 1
        if self._num_done < len(plan.live):
            for bucket in range(len(self._full)):
                self._fold(bucket, self._num_done - 1)
            return
        self._full = [True] * len(self._full)
        self._launch()

    def finish(self) -> StepScalars:
        """Wait for all sums, and return the summed scalars. Afterwards every param.grad is the sum
        over shards, unless sums stay with the owners of slices. Raises ExchangeError when a peer is
        lost or silent, or after cut."""
        plan = self._current()
        if self._num_done < len(plan.live):
            raise RuntimeError(f"shards {plan.live[self._num_done :]} are still to be computed")
        self.transport.finish()
        self._step = None
        extras = self.buckets.expose() if self.slices is None else self.buckets.extras()
        return StepScalars.of(extras, len(self.buckets.layout.slots))

    def free_gradients(self) -> None:
        """Free the gradients' storage after the update, if the member has no peers."""
        if isinstance(self.transport, SoloTransport):
            self.buckets.free()

    def cut(self) -> None:
        """End the exchange, from any thread: `finish` raises here, and soon at the peers."""
        self.transport.cut()
        if self.parameters is not None:
            self.parameters.cut()

    def close(self) -> None:
        """Free the transport. The buckets stay, for the next membership."""
        self.transport.close()
        if self.parameters is not None:
            self.parameters.close()

    def _current(self) -> StepPlan:
        if self._step is None:
            raise RuntimeError("begin_step comes first")
        return self._step

    def _on_full(self, plan: StepPlan) -> Callable[[int], None] | None:
        """Return the callback for full buckets of the next backward; None before the last one."""
        is_last = self._num_to_come == 0 and self._num_done == len(plan.live) - 1
        return self._mark_full if is_last else None

    def _mark_full(self, bucket: int) -> None:
        self._full[bucket] = True
        if self._compressor is not None:
            while self._num_coded < len(self._portions) and self._is_full(self._num_coded):
                self._code_next(self._compressor)
        self._launch()

    def _is_full(self, portion: int) -> bool:
        """Return whether all buckets of the portion are full, except that of the extras, which is
        not coded."""
        buckets = self._portions[portion].buckets
        return all(self._full[bucket] for bucket in buckets if bucket < len(self._full) - 1)

    def _code_next(self, compressor: Compressor) -> None:
        plan, portion = self._current(), self._portions[self._num_coded]
        gradients = self.buckets.views(plan.sets[self._num_done])
        compressor.code(plan.live[self._num_done], portion, gradients)
        self._num_coded += 1

    def _launch(self) -> None:
        """Launch full buckets (declare them final), always in their fixed order."""
        while self._next_bucket < len(self._full) and self._may_launch(self._next_bucket):
            bucket = self._next_bucket
            self._next_bucket += 1
            self._fold(bucket, -1)
            self.transport.launch(bucket)

    def _may_launch(self, bucket: int) -> bool:
        """Return whether the bucket is full, and encoded if shards are encoded."""
        is_done = not self._portions or self._num_done == len(self._current().live)
        return self._full[bucket] and (is_done or bucket < self._coded_buckets)

    @property
    def _coded_buckets(self) -> int:
        return self._portions[self._num_coded - 1].buckets.stop if self._num_coded else 0

    def _fold(self, bucket: int, nth_shard: int) -> None:
        folds = self._current().folds
        for fold in folds[nth_shard] if folds else ():
            target = self.buckets.tensors(fold.target)[bucket]
            target.add_(self.buckets.tensors(fold.source)[bucket])


Reducer = GradientReducer | SingleMemberReducer
"""Either reducer; a step has the same calls with both."""


def solo_exchange(
    buckets: GradientBuckets, num_shards: int, compressor: Compressor | None = None
) -> GradientReducer:
    return GradientReducer(buckets, ShardOwners(0, 1, num_shards), SoloTransport(), compressor)


def mesh_exchange(
    buckets: GradientBuckets,
    link: Link | SharedGroup,
    num_shards: int,
    *,
    all_reduce: str = "direct",
    deadline_s: float = 30.0,
    compressor: Compressor | None = None,
) -> GradientReducer:
    """Make the reducer over a link, which it takes over.

    all_reduce: "direct", whose sums have the bits of the tree, or "ring" or "native", whose sums
    depend on the members. deadline_s: the limit of every wait for a peer. With a compressor, coded
    messages are sent if they take fewer bytes than sums, with the same bits.
    """
    party = ShardOwners(link.rank, link.size, num_shards)
    transport: ReductionTransport
    if isinstance(link, SharedGroup):
        if all_reduce != "direct":
            raise ValueError(f"{all_reduce} all-reduce needs an engine that sends")
        transport = SharedTransport(link, buckets, party, deadline_s=deadline_s)
    else:
        method: Method
        if compressor is not None and pays_off(compressor, num_shards):
            method = PayloadMethod(link, buckets, party, compressor)
        else:
            method = _method(all_reduce, link, buckets, party)
        side = SideStream(buckets.device)
        transport = MeshTransport(link, method, side, deadline_s=deadline_s)
    return GradientReducer(buckets, party, transport, compressor)


def _method(name: str, link: Link, buckets: GradientBuckets, party: ShardOwners) -> Method:
    match name:
        case "direct":
            return DirectMethod(link, buckets.layout, party)
        case "ring":
            return RingMethod(link, buckets.layout)
        case "native" if isinstance(link, CollectiveLink):
            return NativeMethod(link)
        case _:
            raise ValueError(f"no {name!r} all-reduce over {link.name}")


def server_exchange(
    buckets: GradientBuckets,
    rank: int,
    size: int,
    num_shards: int,
    *,
    deadline_s: float = 30.0,
    compressor: Compressor | None = None,
) -> tuple[GradientReducer, ServerTransport]:
    """Make the reducer with its server transport, whose other end is used by the event loop that
    talks to the coordinator."""
    coded = None if compressor is None else CodedFreight(buckets, compressor, rank)
    side = SideStream(buckets.device)
    transport = ServerTransport(buckets.layout, rank, side, deadline_s=deadline_s, coded=coded)
    return GradientReducer(
        buckets, ShardOwners(rank, size, num_shards), transport, compressor
    ), transport

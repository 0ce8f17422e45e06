"""The exchange of a member that has no peers and only one shard.

Its gradients are the sums already. They stay where autograd puts them. Large ones are divided and
measured while they are warm, as backward finishes each, small ones all at once in the end. The bits
are those of the buckets. Used by one thread; only `cut` may come from another. Knows neither model
nor optimizer.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.exchange.buckets.gradient_norm import BLOCK, FewGradients, divided, parts_of
from stratagem.worker.exchange.buckets.step_scalars import StepScalars
from stratagem.worker.mesh.link import ExchangeError

_AS_SUMMED: Final = (torch.float32, torch.float64)
"""Gradients of these are summed as they are; narrower ones need wider storage."""
SMALL_BYTES: Final = 1 << 20
"""Gradients of this size together stay in a core's cache; calls cost more than memory."""


class SingleMemberReducer:
    """Divides and measures the gradients of the only member in place; `fits` must hold of the
    parameters. A step has the same calls as with `GradientReducer`."""

    name: Final = "solo"
    shares_memory: Final = False
    slices: Final = None
    parameters: Final = None
    """There are no other members that could own any."""

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
        """Returns whether the gradients need no buckets to have the same bits: float32 or float64,
        and contiguous."""
        return all(p.dtype in _AS_SUMMED and p.is_contiguous() for _, p in params)

    def begin_step(
        self, step: int, owned: range, num_live: int, *, divisor: float | None = None
    ) -> None:
        """Starts a step as `GradientReducer.begin_step` does; the one shard is always live."""
        if owned != range(1) or num_live != 1:
            raise ValueError(f"one shard is owned here, not {owned} of {num_live}")
        self._divisor, self._scalars, self._is_divided = divisor, None, False

    def begin_shard(self, shard: int, *, num_micro_batches: int = 1) -> None:
        """Begins the shard: the next backward is its first."""
        self._num_to_come = num_micro_batches - 1
        self._norms = [None] * len(self._params)
        for param in self._params:
            param.grad = None
        self._is_last = self._num_to_come == 0

    def next_micro_batch(self) -> None:
        """Lets the next backward add to the shard that was begun."""
        if self._num_to_come < 1:
            raise RuntimeError("the shard has no further micro-batch")
        self._num_to_come -= 1
        self._is_last = self._num_to_come == 0

    def weigh(self, weight: float) -> None:
        """Sets the divisor of the sums, which must be known before the last backward."""
        self._divisor = weight

    def reached(self) -> list[bool]:
        """Returns for each parameter whether backward has reached it in this shard."""
        return [param.grad is not None for param in self._params]

    def end_shard(self, shard: int, scalars: StepScalars) -> None:
        """Completes the gradients; the scalars go with them."""
        if self._num_to_come:
            raise RuntimeError(f"{self._num_to_come} micro-batches are still to be computed")
        self._is_last, self._scalars = False, scalars

    def finish(self) -> StepScalars:
        """Divides what is not divided yet and returns the scalars as they came. Raises
        ExchangeError after cut."""
        if self._is_cut:
            raise ExchangeError("the exchange was cut")
        if self._scalars is None:
            raise RuntimeError("the shard is still to be computed")
        if self._divisor is not None:
            self.divide(self._divisor)
        return self._scalars

    def divide(self, divisor: float) -> None:
        """Divides the gradients that were not divided in the last backward."""
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
        """Returns the result of `gradient_norm.parts_of` for the gradients that exist."""
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
        """Gives the step up: nothing of what was added stays in any gradient."""
        self._is_last = False
        for param in self._params:
            param.grad = None

    def free_gradients(self) -> None:
        """Gives the storage of gradients back, after the update."""
        self.discard()

    def cut(self) -> None:
        """Makes finish raise; from any thread."""
        self._is_cut = True

    def close(self) -> None:
        """Removes the hooks; gradients are left alone from now on."""
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
    """Returns the places, in order, of the smallest parameters whose gradients stay in the cache
    together; none on other devices than the CPU."""
    if any(param.device.type != "cpu" for param in params):
        return []
    order = sorted(range(len(params)), key=lambda index: params[index].nbytes)
    totals = accumulate(params[index].nbytes for index in order)
    return sorted(
        index
        for index, total in zip(order, totals, strict=True)
        if total <= SMALL_BYTES and params[index].numel() <= BLOCK
    )

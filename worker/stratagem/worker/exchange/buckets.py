"""Gradient buckets are the storage in which gradients are summed; it belongs to the model and
outlives memberships.

A *set* is one full copy of all buckets. A member that computes one shard needs one set. A member
that computes several shards keeps the partial sums that it cannot add yet in further sets, which
are made when first needed. Hooks bring each gradient into its slot as backward finishes it and
report full buckets. The module knows neither members nor the network.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.worker.exchange.layout import BUCKET_BYTES, BucketLayout, plan_layout
from stratagem.worker.exchange.slice_owners import KeptSums

# ---- Gradient buckets ----


class GradientBuckets:
    """Buckets that hold the gradients of these parameters and `num_extras` float64 values."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        *,
        num_extras: int,
        bucket_bytes: int = BUCKET_BYTES,
        gives_back: bool = False,
    ) -> None:
        """Plan the buckets. bucket_bytes: the size limit of a bucket of several parameters.
        gives_back: each bucket but the extras has memory only from its first gradient until the
        exchange calls `give_back`."""
        frozen = [name for name, param in params if not param.requires_grad]
        if frozen:
            raise ValueError(f"parameters without gradient do not belong here: {frozen}")
        self.layout: BucketLayout = plan_layout(
            [(name, param.dtype, param.shape) for name, param in params],
            num_extras=num_extras,
            bucket_bytes=bucket_bytes,
        )
        self.layout_digest = self.layout.digest
        self.all: range = range(len(self.layout.buckets))
        self._params = [param for _, param in params]
        self.device = params[0][1].device if params else torch.device("cpu")
        self.gives_back = gives_back
        self._sets: list[list[Tensor]] = []
        self._views: list[list[Tensor]] = []
        self._are_narrow = {
            slot.index
            for slot, param in zip(self.layout.slots, self._params, strict=True)
            if param.dtype != self.layout.buckets[slot.bucket].dtype
        }
        self._narrow: dict[int, Tensor] = {}
        """Gradients in the parameter's type, by index, if the bucket's type is wider."""
        self._in_bucket: list[list[nn.Parameter]] = [[] for _ in self.layout.buckets]
        for slot, param in zip(self.layout.slots, self._params, strict=True):
            self._in_bucket[slot.bucket].append(param)
        self._per_bucket = [len(params) for params in self._in_bucket]
        self._filling: list[Tensor] | None = None
        self._filling_set = 0
        self._is_freed = gives_back  # some buckets may have no memory
        self._on_full: Callable[[int], None] | None = None
        self._filled = [True] * len(self._params)
        self._is_further = False  # a backward whose gradients are added to existing ones
        self._came: list[bool] = []  # by parameter, in a further backward with on_full
        self._num_missing = [0] * len(self.layout.buckets)
        for slot, param in zip(self.layout.slots, self._params, strict=True):
            hook = self._make_hook(slot.index, slot.bucket)
            param.register_post_accumulate_grad_hook(hook)

    @property
    def num_extras(self) -> int:
        return self.layout.buckets[-1].numel

    def tensors(self, index: int) -> list[Tensor]:
        """Return the flat buckets of one set (copy), extras last. Set 0 receives the sums."""
        while len(self._sets) <= index:
            self._add_set(self._make_flats(self.all))
        return self._sets[index]

    def views(self, index: int) -> list[Tensor]:
        """Return the gradients of one set (copy of all buckets), in order of parameter."""
        self.tensors(index)
        return self._views[index]

    def scratch(self, which: range) -> tuple[list[Tensor], list[Tensor]]:
        """Return (flat buckets, gradients in them) of one of the caller's own sets, zeroed."""
        flats = self._make_flats(which)
        return flats, self.views_of(flats, which)

    def move_to(self, sets: Sequence[Sequence[Tensor]]) -> None:
        """Move the sets to this memory, which must be zero, or to new memory if None. Their content
        is lost."""
        self._sets, self._views = [], []
        for flats in sets:
            self._add_set(list(flats))

    def free(self) -> None:
        """Free the memory of all sets. A bucket gets memory again with its first gradient."""
        self.discard()
        self._is_freed = True
        for flats in self._sets:
            for flat in flats:
                flat.untyped_storage().resize_(0)

    def hold(self) -> None:
        """Allocate freed memory as zeros again, unless a bucket's first gradient allocates it."""
        if self.gives_back:
            return
        for index in range(len(self._sets)):
            self._hold_set(index)
        self._is_freed = False

    def give_back(self, bucket: int) -> None:
        """Free a bucket's memory in all sets: nothing may read or write it any more, and no `.grad`
        may refer to it, since an unexpected backward pass would write to it."""
        for param in self._in_bucket[bucket]:
            param.grad = None
        for flats in self._sets:
            flats[bucket].untyped_storage().resize_(0)

    def _hold_set(self, index: int, first: int = 0) -> None:
        for bucket in range(first, len(self._sets[index])):
            self._hold(index, bucket)

    def _hold(self, index: int, bucket: int) -> None:
        flat = self._sets[index][bucket]
        if flat.numel() and flat.untyped_storage().size() == 0:
            flat.untyped_storage().resize_(flat.nbytes)
            flat.zero_()

    def begin(self, index: int, on_full: Callable[[int], None] | None) -> None:
        """Direct the next gradients into this set (bucket copy); on_full gets each full bucket."""
        self.tensors(index)
        self._filling, self._filling_set = self._views[index], index
        self._on_full = on_full
        self._filled = [False] * len(self._params)
        self._is_further = False
        self._num_missing = list(self._per_bucket)
        for param in self._params:
            param.grad = None

    def go_on(self, on_full: Callable[[int], None] | None) -> None:
        """Let a further backward add to the set; on_full is called with each full bucket."""
        self._on_full, self._is_further = on_full, True
        if on_full is not None:
            self._came = [False] * len(self._params)
            self._num_missing = list(self._per_bucket)

    def reached(self) -> list[bool]:
        """Return for each parameter whether the present set has its gradient."""
        return list(self._filled)

    def discard(self) -> None:
        """Drop the present set and all gradients."""
        self._filling = self._on_full = None
        for param in self._params:
            param.grad = None

    def fill(self, gradients: Iterable[Tensor]) -> None:
        """Copy gradients computed elsewhere, in order of parameter, into the present set."""
        if self._filling is None:
            raise RuntimeError("begin comes first")
        for view, gradient in zip(self._filling, gradients, strict=True):
            view.copy_(gradient)
        self._filled = [True] * len(self._filled)

    def end(self, index: int, extras: Tensor, first: int = 0) -> None:
        """Finish the present set: zero the slots that backward did not reach. first: the first
        bucket not launched yet."""
        if self._is_freed:
            self._hold_set(index, first)
        for filled, view in zip(self._filled, self._views[index], strict=True):
            if not filled:
                view.zero_()
        self._sets[index][-1].copy_(extras)
        self._filling = self._on_full = None
        self._is_further = False

    def expose(self) -> Tensor:
        """Set every param.grad to its sum, in set 0; return the summed extras (scalars)."""
        self.tensors(0)
        for index, (param, view) in enumerate(zip(self._params, self._views[0], strict=True)):
            if index in self._are_narrow:
                narrow = self._narrow.get(index)
                if narrow is None:
                    narrow = self._narrow[index] = torch.empty_like(param)
                view = narrow.copy_(view)
            param.grad = view
        return self._sets[0][-1].to("cpu", copy=True)

    def extras(self) -> Tensor:
        """Drop every param.grad; return the summed extras (the step's scalars)."""
        for param in self._params:
            param.grad = None
        return self._sets[0][-1].to("cpu", copy=True)

    def divide(self, divisor: float) -> None:
        """Divide the sums in the bucket's type, so that a narrow (16-bit) parameter rounds once."""
        for flat in self.tensors(0)[:-1]:
            flat.div_(divisor)
        self.expose()

    def _make_flats(self, which: range) -> list[Tensor]:
        # The gaps between slots are exchanged too and must be finite, hence zeros.
        buckets = self.layout.buckets[which.start : which.stop]
        if self.gives_back:  # they get zeros with their memory
            *others, extras = buckets
            made = [torch.empty(b.numel, dtype=b.dtype, device=self.device) for b in others]
            return [*made, torch.zeros(extras.numel, dtype=extras.dtype, device=self.device)]
        return [
            torch.zeros(bucket.numel, dtype=bucket.dtype, device=self.device) for bucket in buckets
        ]

    def _add_set(self, flats: list[Tensor]) -> None:
        self._sets.append(flats)
        self._views.append(self.views_of(flats, self.all))
        if self.gives_back:
            for flat in flats[:-1]:
                flat.untyped_storage().resize_(0)

    def views_of(self, flats: Sequence[Tensor], which: range) -> list[Tensor]:
        """Return the gradients in these flat buckets, in order of parameter."""
        return [
            flats[slot.bucket - which.start]
            .narrow(0, slot.offset, slot.shape.numel())
            .view(slot.shape)
            for slot in self.layout.slots
            if slot.bucket in which
        ]

    def _add_again(self, index: int, bucket: int, param: Tensor) -> None:
        """Add a further gradient of the shard to its slot, unless autograd has done so."""
        if self._on_full is not None and self._num_missing[bucket] == 0:
            name = self.layout.slots[index].name
            raise RuntimeError(
                f"parameter {name} got a gradient again after its bucket was handed over: "
                "a micro-batch is one backward, without re-entrant checkpointing"
            )
        if index in self._are_narrow and self._filling is not None and param.grad is not None:
            self._filling[index].add_(param.grad)
            param.grad = None
        if self._is_further and self._on_full is not None and not self._came[index]:
            self._came[index] = True
            self._count(bucket)

    def _count(self, bucket: int) -> None:
        self._num_missing[bucket] -= 1
        if self._num_missing[bucket] == 0 and self._on_full is not None:
            self._on_full(bucket)

    def _take(self, index: int, bucket: int, param: Tensor) -> None:
        """Move a gradient that backward has just finished into its slot."""
        if self._filling is None:
            return  # a backward that is not part of a shard
        if self._filled[index]:
            self._add_again(index, bucket, param)
            return
        if self._is_freed:
            self._hold(self._filling_set, bucket)
        # Copying the first gradient into place costs less memory traffic than adding it to
        # zeros, and keeps a negative zero.
        view, grad = self._filling[index], param.grad
        assert grad is not None
        view.copy_(grad)
        param.grad = None if index in self._are_narrow else view
        self._filled[index] = True
        if self._is_further and self._on_full is not None:
            self._came[index] = True
        self._count(bucket)

    def _make_hook(self, index: int, bucket: int) -> Callable[[Tensor], None]:
        # Autograd keeps hooks out of reach of Python's collector: a hook that referred to the
        # parameter would keep the parameters, and all these sets, alive until exit.
        owner = weakref.ref(self)

        def hook(param: Tensor) -> None:
            buckets = owner()
            if buckets is not None:
                buckets._take(index, bucket, param)

        return hook


# ---- Buckets without permanent memory ----
#
# A lent bucket gives its memory back: it travels through a few windows, and sums are kept
# elsewhere. It has its own memory from its first gradient until the transfer thread copies it into
# a window, so only the part of a gradient by which backward is ahead of the exchange is in memory.

NUM_WINDOWS: Final = 4


class LentBuckets:
    """Send buffers (windows) of a member whose buckets give their memory back."""

    def __init__(self, buckets: GradientBuckets, kept: KeptSums) -> None:
        self.buckets, self.kept = buckets, kept
        self._windows: list[list[Tensor]] = []
        """The windows of each set, which buckets use in turn."""

    def sets(self, sets: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return these sets with each bucket but the extras replaced by a window; buckets
        `NUM_WINDOWS` apart share one."""
        widest = max((bucket.size_bytes for bucket in self.buckets.layout.buckets[:-1]), default=0)
        while len(self._windows) < len(sets):
            made = torch.zeros(NUM_WINDOWS, widest, dtype=torch.uint8, device=self.buckets.device)
            self._windows.append(list(made))
        return [
            [*(_as(flat, windows, bucket) for bucket, flat in enumerate(one_set[:-1])), one_set[-1]]
            for one_set, windows in zip(sets, self._windows, strict=False)
        ]

    def fill(self, bucket: int, num_partials: int) -> None:
        """Copy the partial sums of a bucket into its window (send buffer); free its memory."""
        if bucket == len(self.buckets.layout.buckets) - 1:
            return
        for index in range(num_partials):
            flat = self.buckets.tensors(index)[bucket]
            _as(flat, self._windows[index], bucket).copy_(flat)
        self.buckets.give_back(bucket)


def _as(flat: Tensor, windows: Sequence[Tensor], bucket: int) -> Tensor:
    return windows[bucket % NUM_WINDOWS][: flat.nbytes].view(flat.dtype)

"""Run forward and backward over rows of a data set; all gradients of a model are made here.

Trainers, gossip nodes and federated clients differ in what they do with gradients, not in how they
make them. The gradients of micro-batches are added to the parameters' `.grad` in order and in
place: where `.grad` is part of a flat bucket, they add up there. The module knows neither shards
nor the exchange nor the optimizer.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from stratagem.common.base.errors import UserCodeError
from stratagem.common.numerics.keys import Key
from stratagem.worker.data.datasets import Coming, Dataset, Gather, TensorDataset
from stratagem.worker.data.rows import BatchKeys
from stratagem.worker.host.stalls import per_thread
from stratagem.worker.models.tensors import refuse_sparse_gradients
from stratagem.worker.numerics.model import ModelExecution
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.objectives.objective import Logged, LossValue, Objective
from stratagem.worker.objectives.step_function import MAX_LOGGED, MAX_NAME_CHARS
from stratagem.worker.user_code.entrypoints import user_code

# ---- Backward pass ----

_ENGINE: Final = getattr(torch.autograd.graph, "_engine_run_backward", None)


def run_backward(root: Tensor, begin: Tensor | None) -> None:
    """Run `root.backward(begin)` faster, with the same bits; both tensors are 0-d.

    Given a gradient, torch compares two shapes with a library for symbolic shapes, whose import
    takes 0.4 s in every process. Tensors that override torch functions take torch's own path.
    """
    if begin is None or _ENGINE is None or type(root) is not Tensor:
        root.backward(begin)
        return
    _ENGINE((root,), (begin,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# ---- Errors of autograd ----
#
# A user's own function may return a gradient of a wrong shape. torch's error names only the
# function, so the names of the parameters are added to it.

_REFUSED: Final = re.compile(r"Function (\w+) returned an invalid gradient at index (\d+)")


def raise_with_names(
    error: RuntimeError, roots: Iterable[Tensor], named: Iterable[tuple[str, nn.Parameter]]
) -> NoReturn:
    """Raise a backward pass's error again, with the names of the parameters it is about."""
    named = list(named)
    refuse_sparse_gradients(named)
    names = _names_in(error, roots, named)
    if not names:
        raise error
    words = f"parameter {names[0]}" if len(names) == 1 else f"parameters {', '.join(names)}"
    text = f"{error}; it is on the way to the gradient of {words}"
    raise RuntimeError(text) from error


def _names_in(
    error: RuntimeError, roots: Iterable[Tensor], named: Iterable[tuple[str, nn.Parameter]]
) -> list[str]:
    """Return the names of the parameters whose gradients the error is about, if any."""
    refused = _REFUSED.search(str(error))
    if refused is None:
        return []
    name_of = {id(param): name for name, param in named}
    starts = [
        edges[index][0]
        for node in _nodes(root.grad_fn for root in roots)
        if node.name() == refused[1]
        for edges, index in [(node.next_functions, int(refused[2]))]
        if index < len(edges)
    ]
    # Of a function that is not given a parameter itself, those behind what it is given.
    return [
        name_of[id(node.variable)]
        for node in _nodes(starts)
        if id(getattr(node, "variable", None)) in name_of
    ]


def _nodes(starts: Iterable[Any]) -> list[Any]:
    """Return all nodes of the autograd graph behind `starts`, each once."""
    nodes: dict[int, Any] = {}
    pending = [node for node in starts if node is not None]
    while pending:
        node = pending.pop()
        if id(node) not in nodes:
            nodes[id(node)] = node
            pending += [after for after, _ in node.next_functions if after is not None]
    return list(nodes.values())


# ---- Sums of logged values ----
#
# What a step function logs is added up over shards together with the gradients. A member without
# rows knows no names, so the names travel too, as numbers, with a checksum by which all members
# know that all shards have the same ones.

LoggedSums = Mapping[str, tuple[float, float]]
"""(Σ mean · weight, Σ weight) keyed by name, sorted by name."""

_CHARS: Final = 4
"""Number of characters packed into a float64: the sum over 2^21 shards is still exact."""
_PER_NAME: Final = -(-MAX_NAME_CHARS // _CHARS)
_FIRST_NAME: Final = 2 + 2 * MAX_LOGGED
NUM_EXTRAS: Final = _FIRST_NAME + _PER_NAME * MAX_LOGGED
"""Number of float64 values for a shard's logged sums: the number of logging shards, a checksum of
the names, sums, weights, and the names."""


def added(sums: LoggedSums, more: LoggedSums) -> LoggedSums:
    """Return the sums of two mappings by name; a missing name counts as zero."""
    both = dict(sums)
    for name, (total, weight) in more.items():
        before, weight_before = both.get(name, (0.0, 0.0))
        both[name] = (before + total, weight_before + weight)
    return both


def sums_of(values: Sequence[LossValue]) -> LoggedSums:
    """Return the sums of the logged values over micro-batches, added in order."""
    sums: LoggedSums = {}
    for value in values:
        sums = added(sums, {logged_value.name: _sum(logged_value) for logged_value in value.log})
    return sums


def _sum(logged: Logged) -> tuple[float, float]:
    weight = logged.weight  # of nothing, the mean may be anything
    return (float(logged.mean) * weight if weight else 0.0, weight)


def means(sums: LoggedSums) -> dict[str, float]:
    """Return the weighted mean of each name; names without weight are left out."""
    return {name: total / weight for name, (total, weight) in sums.items() if weight}


def packed(sums: LoggedSums) -> Tensor:
    """Encode the sums of a shard as `NUM_EXTRAS` float64 values; all zeros if nothing is logged."""
    names, values = tuple(sums), [0.0] * NUM_EXTRAS
    if names:
        values[:2] = [1.0, _checksum(names)]
    for place, (name, (total, weight)) in enumerate(sums.items()):
        values[2 + 2 * place : 4 + 2 * place] = [total, weight]
        start = _FIRST_NAME + place * _PER_NAME
        values[start : start + _PER_NAME] = _code(name)
    return torch.tensor(values, dtype=torch.float64)


def unpacked(total: Tensor, own: Sequence[str] | None = None) -> LoggedSums:
    """Decode the sums over all shards. total: the sum of the results of `packed`.

    own: the names that this member's shards have logged; None if it has no shards. Raises
    UserCodeError unless all shards have the same names.
    """
    if isinstance(total, FakeTensor):
        return {}  # a step that is played for an estimate has no values
    count, checksums, *values = total.tolist()
    if not count:
        return {}
    codes = [value / count for value in values[2 * MAX_LOGGED :]]
    names = _decoded(codes) if own is None else tuple(own)
    if checksums != count * _checksum(names):
        names_here = ", ".join(own or ()) or "none"
        text = "the log of the step must have the same names in each micro-batch; on this worker "
        raise UserCodeError("ValueError", f"{text}they are {names_here}, and on others they differ")
    return {name: (values[2 * place], values[2 * place + 1]) for place, name in enumerate(names)}


def _code(name: str) -> list[float]:
    text = name.encode().ljust(_PER_NAME * _CHARS, b"\0")
    return [float(int.from_bytes(text[at : at + _CHARS])) for at in range(0, len(text), _CHARS)]


def _decoded(codes: Sequence[float]) -> tuple[str, ...]:
    texts = [
        b"".join(int(code).to_bytes(_CHARS) for code in codes[start : start + _PER_NAME])
        for start in range(0, len(codes), _PER_NAME)
    ]
    return tuple(name for text in texts if (name := text.rstrip(b"\0").decode(errors="replace")))


def _checksum(names: tuple[str, ...]) -> float:
    return float(zlib.crc32("\n".join(names).encode()))


# ---- Forward and backward ----


@dataclass(frozen=True, slots=True)
class Counted:
    """The loss over some rows: Σ mean loss · weight, and Σ weight in rows or tokens."""

    loss_sum: float
    weight: float
    logged: LoggedSums = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean loss; `loss_sum` if the weight is 0, so that a non-finite loss stays visible."""
        return self.loss_sum / self.weight if self.weight else self.loss_sum


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a data set, their name in error messages, and the key of their random numbers in
    this epoch."""

    dataset: Dataset
    indices: Tensor
    activity: str
    key: Key


@dataclass(frozen=True, slots=True)
class Window:
    """The micro-batches of one shard's part of a step, and callbacks around them.

    cuts: the ranges of rows, in order. key: returns the key of a micro-batch's random numbers.
    before: called with the number of each micro-batch before its forward pass. before_backward:
    called with the weight so far before each backward pass.
    """

    cuts: Sequence[range]
    key: Callable[[int], Key]
    before: Callable[[int], None] = lambda _: None
    before_backward: Callable[[float], None] = lambda _: None


def part(rows: Tensor, cut: range) -> Tensor:
    """Return rows[cut]; if the cut covers all rows, `rows` itself, which is faster."""
    return rows if len(cut) == rows.shape[0] else rows[cut.start : cut.stop]


def micro_batches(rows: Rows, cuts: Sequence[range], key: Callable[[int], Key]) -> Iterator[Coming]:
    """Yield each micro-batch of the rows as arguments of `Gather`, for reading ahead."""
    for number, cut in enumerate(cuts):
        yield rows.dataset, part(rows.indices, cut), BatchKeys(rows.key, key(number))


@dataclass(slots=True)
class Start:
    """Cache of the gradient with which backward starts: the weight, mostly equal in all steps."""

    latest: Tensor | None = None
    weight: float = 0.0
    is_first: bool = True
    """True until the first backward pass."""

    def of(self, mean: Tensor, weight: float) -> Tensor:
        """Return the weight as a 0-d tensor like `mean`, if possible that of the last call."""
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
    """Computes the gradients of a model over rows. Used by one thread.

    A window is one transaction: an error in any micro-batch ends it, and the caller drops all its
    gradients. A cancelled plan ends it too, between two micro-batches.
    """

    model: nn.Module
    objective: Objective
    gather: Gather
    randomness: KeyedRandomness
    execution: ModelExecution
    start: Start = field(default_factory=Start)
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context manager for the forward and backward pass of each micro-batch."""

    def add_sums(self, rows: Rows, window: Window) -> Counted:
        """Add the gradient of mean · weight · scale of each micro-batch to `.grad`, in order."""
        return self._run(rows, window, is_weighted=True)

    def add_mean(self, rows: Rows, window: Window, *, must_divide: bool) -> Counted:
        """Set `.grad`, so far None, to the gradient of the mean (or sum) over the window.

        Several micro-batches are added with their weights and divided once; one is used directly.
        """
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
        weight, activity = 0.0, per_thread.activity

        def weigh(row_weight: float) -> None:
            nonlocal weight
            weight += row_weight
            window.before_backward(weight)

        for number, cut in enumerate(window.cuts):
            if number:
                activity.check()
            window.before(number)
            key = window.key(number)
            self.randomness.begin(*key, is_users=is_users)
            micro_rows = replace(rows, indices=part(rows.indices, cut))
            values.append(self._run_one(micro_rows, BatchKeys(rows.key, key), weigh, is_weighted))
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
        """Run forward and backward of one micro-batch; return its loss, detached."""
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

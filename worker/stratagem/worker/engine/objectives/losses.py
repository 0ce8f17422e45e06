"""Training losses: each answers (mean, weight), the mean being over `weight` rows or tokens.

The weight is what makes a sum over uneven shards equal one big batch: gradients are added as
mean × weight and divided once by the total weight. Must not know shards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stratagem.common.job import LossSpec
from stratagem.common.schema.frozen import thawed
from stratagem.worker.user_code.entrypoints import EntryPoints


class Logged(NamedTuple):
    """A number that is shown beside the loss: a mean over `weight` rows, tokens or the like."""

    name: str
    mean: float | Tensor
    weight: float


@dataclass(frozen=True, slots=True)
class LossValue:
    """A scalar mean that can be differentiated, and the rows or tokens it is a mean over."""

    mean: Tensor
    weight: float
    log: tuple[Logged, ...] = ()


class Assessment(NamedTuple):
    """What an objective finds in one batch of an evaluation; output and target are for metrics."""

    loss: LossValue
    output: Any
    target: Any


_IGNORED: Final = -100
"""A target that counts nothing, unless `ignore_index` names another one."""

LossFunction = Callable[[Any, Any, int], LossValue]
"""(output, target, num_rows) -> LossValue."""


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A loss of the table below with its settings; none of it is code of the user's."""

    name: str
    function: Callable[[Any, Any, int, Mapping[str, Any]], LossValue]
    kwargs: Mapping[str, Any]

    def __call__(self, output: Any, target: Any, num_rows: int) -> LossValue:
        """A `LossFunction`. What torch refuses is told with what the loss was given."""
        try:
            return self.function(output, target, num_rows, self.kwargs)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if type(error) not in (IndexError, RuntimeError, TypeError, ValueError):
                raise  # such as one of memory, which says more by its class
            raise type(error)(self._explained(str(error), output, target)) from None

    def _explained(self, text: str, output: Any, target: Any) -> str:
        """The sentence of an error, with the outputs and the targets that it is about."""
        given = f"{self.name} got outputs {_kind(output)} and targets {_kind(target)}"
        if "out of bounds" not in text or not isinstance(output, Tensor):
            return f"{text.rstrip('.')}; {given}"
        classes = output.shape[-1 if self.name == "token_cross_entropy" or output.dim() < 2 else 1]
        ignored = int(self.kwargs.get("ignore_index", _IGNORED))
        counted = target[target != ignored]
        return (
            f"{text.rstrip('.')}: the model has {classes} outputs, so targets are 0 to "
            f"{classes - 1}; those of this batch are {int(counted.min())} to {int(counted.max())}. "
            f"{given}"
        )


def make_loss(spec: LossSpec, entrypoints: EntryPoints) -> LossFunction:
    """Makes the loss that a job names."""
    if spec.entrypoint is not None:
        own = entrypoints.bind(spec.entrypoint, spec.kwargs, "loss")
        return _user_loss(own, f'what "{spec.entrypoint}" returns')
    assert spec.name is not None
    return NamedLoss(spec.name, _LOSSES[spec.name], thawed(spec.kwargs))


def _kind(value: Any) -> str:
    """The type and the shape of a value, as "float32[16, 10]"."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def counts_rows(spec: LossSpec) -> bool:
    """Returns whether the weight of the loss is the number of rows, independent of their values."""
    return spec.entrypoint is None and spec.name != "token_cross_entropy"


def _user_loss(function: Callable[..., Any], what: str) -> LossFunction:
    """what: the words for its value."""

    def loss(output: Any, target: Any, num_rows: int) -> LossValue:
        value = function(output, target)
        pair = value if isinstance(value, tuple) else (value, num_rows)
        if len(pair) != 2:
            raise ValueError(f"{what} must be a loss or (loss, weight), not {len(pair)} values")
        mean, weight = pair
        return LossValue(one_number(mean, what), float(weight))

    return loss


def one_number(mean: Any, what: str) -> Tensor:
    """Returns a tensor of one element as one of no dimensions; raises ValueError for others."""
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        kind = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
        raise ValueError(f"{what} must be one number as a tensor, not {kind}")
    return mean.reshape(())


def _same_shape(output: Tensor, target: Tensor) -> None:
    """Refuses what would be broadcast silently into a wrong loss."""
    if output.shape != target.shape:
        raise ValueError("outputs and targets must have the same shape")


def _cross_entropy(x: Tensor, y: Tensor, rows: int, kwargs: Mapping[str, Any]) -> LossValue:
    return LossValue(F.cross_entropy(x, y, **kwargs), rows)


def _nll(x: Tensor, y: Tensor, rows: int, kwargs: Mapping[str, Any]) -> LossValue:
    return LossValue(F.nll_loss(x, y), rows)


def _mse(x: Tensor, y: Tensor, rows: int, kwargs: Mapping[str, Any]) -> LossValue:
    _same_shape(x, y)
    return LossValue(F.mse_loss(x, y), rows)


def _l1(x: Tensor, y: Tensor, rows: int, kwargs: Mapping[str, Any]) -> LossValue:
    _same_shape(x, y)
    return LossValue(F.l1_loss(x, y), rows)


def _bce_with_logits(x: Tensor, y: Tensor, rows: int, kwargs: Mapping[str, Any]) -> LossValue:
    target = y.to(x.dtype)
    _same_shape(x, target)
    positive = kwargs.get("pos_weight")
    pos_weight = None if positive is None else torch.as_tensor(positive, dtype=x.dtype).to(x.device)
    return LossValue(F.binary_cross_entropy_with_logits(x, target, pos_weight=pos_weight), rows)


def _token_cross_entropy(x: Tensor, y: Tensor, rows: int, kwargs: Mapping[str, Any]) -> LossValue:
    """Classes last; the mean is over the tokens not ignored; there may be none."""
    ignored = int(kwargs.get("ignore_index", _IGNORED))
    total = F.cross_entropy(
        x.reshape(-1, x.shape[-1]),
        y.reshape(-1),
        ignore_index=ignored,
        label_smoothing=float(kwargs.get("label_smoothing", 0.0)),
        reduction="sum",
    )
    counted = int((y != ignored).sum())
    return LossValue(total / max(counted, 1), counted)


_LOSSES: Final[Mapping[str, Callable[[Tensor, Tensor, int, Mapping[str, Any]], LossValue]]] = {
    "bce_with_logits": _bce_with_logits,
    "cross_entropy": _cross_entropy,
    "l1": _l1,
    "mse": _mse,
    "nll": _nll,
    "token_cross_entropy": _token_cross_entropy,
}

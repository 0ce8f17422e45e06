"""Objectives: functions from a model and one micro-batch to (mean loss, weight, log).

An objective calls the model itself, so it may be a loss of the model's output, or any function of
model and batch. The training and evaluation of a whole model use only objectives; a pipeline, whose
model is in stages, needs the loss of an output.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import LossSpec
from stratagem.common.schema.json import thawed
from stratagem.worker.user_code.call_notes import noted, text_of
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Losses ----
#
# Each loss returns (mean, weight), the mean being over `weight` rows or tokens. The weight makes a
# sum over uneven shards equal one big batch: gradients are added as mean × weight and divided once
# by the total weight.


class Logged(NamedTuple):
    """A number that is shown in addition to the loss: a mean over `weight` rows, tokens or the
    like."""

    name: str
    mean: float | Tensor
    weight: float


@dataclass(frozen=True, slots=True)
class LossValue:
    """A differentiable scalar mean loss, and the number of rows or tokens in it."""

    mean: Tensor
    weight: float
    log: tuple[Logged, ...] = ()


class Assessment(NamedTuple):
    """The result of an objective for an evaluated batch; output and target are for metrics."""

    loss: LossValue
    output: Any
    target: Any


_REFUSALS: Final = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""Error types by which torch's losses refuse their arguments."""

_IGNORED: Final = -100
"""The target that is not counted, unless `ignore_index` sets another one."""

LossFunction = Callable[[Any, Any, int], LossValue]
"""Computes a LossValue from (output, target, num_rows)."""


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A loss known by name (see the table below) with its settings; runs no code of the user."""

    name: str
    function: Callable[[Any, Any, int, Mapping[str, Any]], LossValue]
    kwargs: Mapping[str, Any]

    def __call__(self, output: Any, target: Any, num_rows: int) -> LossValue:
        """Compute the loss. Errors of torch are raised again with the shapes of the arguments."""
        try:
            return self.function(output, target, num_rows, self.kwargs)
        except _REFUSALS as error:
            if type(error) not in _REFUSALS:
                raise  # such as one of memory, whose class says more
            raise type(error)(self._explained(str(error), output, target)) from None

    def _explained(self, text: str, output: Any, target: Any) -> str:
        """Return an error's text together with a description of outputs and targets."""
        given = f"{self.name} got outputs {text_of(output)} and targets {text_of(target)}"
        if "out of bounds" not in text or not isinstance(output, Tensor):
            return f"{text.rstrip('.')}; {given}{loss_hint(self.name, output, target)}"
        classes = output.shape[-1 if self.name == "token_cross_entropy" or output.dim() < 2 else 1]
        ignored = int(self.kwargs.get("ignore_index", _IGNORED))
        counted = target[target != ignored]
        return (
            f"{text.rstrip('.')}: the model has {classes} outputs, so targets are 0 to "
            f"{classes - 1}; those of this batch are {int(counted.min())} to {int(counted.max())}. "
            f"{given}"
        )


def make_loss(spec: LossSpec, entrypoints: EntryPoints) -> LossFunction:
    """Make the loss that a job names, by its name or by an entry point."""
    if spec.entrypoint is not None:
        function = entrypoints.bind(spec.entrypoint, spec.kwargs, "loss")
        return _user_loss(function, f'what "{spec.entrypoint}" returns')
    assert spec.name is not None
    return NamedLoss(spec.name, _LOSSES[spec.name], thawed(spec.kwargs))


def loss_hint(name: str, output: Any, target: Any) -> str:
    """Return a remedy if outputs and targets do not fit the loss; "" if none is known."""
    remedy = "name a loss of your own of (output, target), as `loss: module:function`"
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        return f"; the model returns a {kind}: return its tensor alone in forward, or {remedy}"
    if not isinstance(target, Tensor):
        pairs = "return pairs (x, y) as rows or from data.collate"
        return f"; a batch that is no pair (x, y) is input and target at once: {pairs}, or {remedy}"
    takes_classes = name in ("cross_entropy", "nll")
    if takes_classes and output.dim() > 2 and target.shape == output.shape[:-1]:
        return (
            "; outputs whose last dimension is the classes, as of a language model, are for "
            "`loss: token_cross_entropy`"
        )
    if takes_classes and target.shape == (output.shape[0], 1):
        return "; class numbers have one dimension: y.squeeze(1) in data.entrypoint"
    if takes_classes and target.is_floating_point() and target.dim() < output.dim():
        return "; class numbers are int64: y.long() in data.entrypoint"
    if name == "token_cross_entropy" and target.shape != output.shape[:-1]:
        return f"; targets of such outputs have the shape {list(output.shape[:-1])}"
    if not takes_classes and output.numel() == target.numel():
        shape = list(output.shape)
        return f"; reshape y to {shape} in data.entrypoint, or the output in forward"
    if not takes_classes and target.shape == output.shape[:1]:
        return "; targets that are class numbers are for `loss: cross_entropy`"
    return ""


def counts_rows(spec: LossSpec) -> bool:
    """Return whether the weight of the loss is always the number of rows."""
    return spec.entrypoint is None and spec.name != "token_cross_entropy"


def _user_loss(function: Callable[..., Any], what: str) -> LossFunction:
    """Wrap the user's function as a loss function. what: its name in errors."""

    def loss(output: Any, target: Any, num_rows: int) -> LossValue:
        with noted("the loss", (output, target)):
            value = function(output, target)
        pair = value if isinstance(value, tuple) else (value, num_rows)
        if len(pair) != 2:
            raise ValueError(f"{what} must be a loss or (loss, weight), not {len(pair)} values")
        mean, weight = pair
        return LossValue(one_number(mean, what), float(weight))

    return loss


def one_number(mean: Any, what: str) -> Tensor:
    """Return a tensor of one element as a 0-d tensor. Raises ValueError for others."""
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        kind = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
        raise ValueError(f"{what} must be one number as a tensor, not {kind}")
    return mean.reshape(())


def _same_shape(output: Tensor, target: Tensor) -> None:
    """Raise ValueError for different shapes, which would silently be broadcast to a wrong loss."""
    if output.shape != target.shape:
        raise ValueError("outputs and targets must have the same shape")


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
    """Return the mean over the tokens that are not ignored (maybe none). Classes are in the last
    dimension."""
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
    "cross_entropy": lambda x, y, rows, kwargs: LossValue(F.cross_entropy(x, y, **kwargs), rows),
    "l1": _l1,
    "mse": _mse,
    "nll": lambda x, y, rows, _: LossValue(F.nll_loss(x, y), rows),
    "token_cross_entropy": _token_cross_entropy,
}


# ---- Objectives ----


class Objective(Protocol):
    """Interface of objectives of a training. num_rows: planned size of the micro-batch."""

    @property
    def is_users(self) -> bool:
        """True if it runs the user's code, which may use any random generator."""

    @property
    def counts_rows(self) -> bool:
        """True if the weight is always the number of rows, and so known in advance."""

    @property
    def may_log(self) -> bool:
        """True if it may log numbers besides the loss."""

    def __call__(self, model: nn.Module, x: Any, y: Any, num_rows: int) -> LossValue:
        """Compute the forward pass and the loss of a micro-batch; the caller runs backward."""

    def evaluate(
        self, model: nn.Module, x: Any, y: Any, num_rows: int, *, wants_output: bool
    ) -> Assessment:
        """Compute a batch's loss without gradients. wants_output: return output and target, too."""


@dataclass(frozen=True, slots=True)
class OutputLoss:
    """Objective of jobs with a `loss` of output and target."""

    loss: LossFunction
    counts_rows: bool
    may_log: bool = field(default=False, init=False)

    @property
    def is_users(self) -> bool:
        """True if the loss is an entry point."""
        return not isinstance(self.loss, NamedLoss)

    def __call__(self, model: nn.Module, x: Any, y: Any, num_rows: int) -> LossValue:
        """Compute the loss of a micro-batch, as an `Objective`."""
        with noted(model, x):
            output = model(x)
        return self.loss(output, y, num_rows)

    def evaluate(
        self, model: nn.Module, x: Any, y: Any, num_rows: int, *, wants_output: bool
    ) -> Assessment:
        """Compute output and loss of a batch without gradients."""
        with noted(model, x):
            output = model(x)
        return Assessment(self.loss(output, y, num_rows), output, y)


# ---- Loss that the model returns ----
#
# Some models return a loss, as those of transformers do. A sum over uneven parts equals one big
# batch only if each mean comes with the number of items in it. Models do not report it, so it is
# counted in the labels of the batch, by a rule that depends only on the model's class and the
# labels' type.

Weight = Literal["rows", "labels", "shifted_labels"]

IGNORED: Final = -100
"""The label of positions that the loss does not count."""
_CAUSAL: Final = frozenset(
    {"BertLMHeadModel", "CTRLLMHeadModel", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel"}
)
"""Causal language models of transformers whose names do not end in `ForCausalLM`."""


@dataclass(frozen=True, slots=True)
class ReturnedLoss:
    """Objective of jobs with `loss: {name: model}`: the loss is `model(**batch).loss`.

    weight: what the loss is a mean of; None: as `weight_of` says. If nothing is counted, the loss
    is 0 without gradient, whatever the model returned.
    """

    weight: Weight | None

    @property
    def is_users(self) -> bool:
        """Return True: the model's code computes the loss."""
        return True

    @property
    def counts_rows(self) -> bool:
        """True if the job says that the loss is a mean over rows; otherwise the labels decide."""
        return self.weight == "rows"

    @property
    def may_log(self) -> bool:
        """Return False: a model returns nothing to log."""
        return False

    def __call__(self, model: nn.Module, x: Any, y: Any, num_rows: int) -> LossValue:
        """Compute the loss of a micro-batch, as an `Objective`."""
        return self._run(model, x, y, num_rows)[0]

    def evaluate(
        self, model: nn.Module, x: Any, y: Any, num_rows: int, *, wants_output: bool
    ) -> Assessment:
        """Compute the loss of a batch without gradients.

        For metrics, the output is `logits` (or all results but the loss), the target `labels`,
        aligned with the predictions.
        """
        loss, outputs = self._run(model, x, y, num_rows)
        labels = x.get("labels")
        if isinstance(labels, Tensor) and self._weight(model, labels) == "shifted_labels":
            labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        return Assessment(loss, _output(outputs), x if labels is None else labels)

    def _run(self, model: nn.Module, x: Any, y: Any, num_rows: int) -> tuple[LossValue, Any]:
        if not isinstance(x, Mapping) or not (y is x or y is None):
            what = type(x).__name__ if y is x else "pair"
            text = f"model calls model(**batch), and the batch is a {what}; rows, or what "
            raise InvalidInputError.at("loss", f"{text}data.collate makes of them, must be dicts")
        with noted("model(**batch)", x):
            outputs = model(**x)
        counted = self._count(model, x.get("labels"), num_rows)
        mean = _loss_of(outputs, model, x)
        if not counted:  # transformers returns NaN; this has no gradient
            mean = mean.new_zeros((), requires_grad=mean.requires_grad)
        return LossValue(mean, counted), outputs

    def _count(self, model: nn.Module, labels: Any, num_rows: int) -> int:
        weight = self._weight(model, labels)
        if weight == "rows":
            return num_rows
        if not isinstance(labels, Tensor):
            text = f"is {weight}, and the batch has no tensor `labels`; set it to rows"
            raise InvalidInputError.at("loss.weight", text)
        counted = labels[:, 1:] if weight == "shifted_labels" else labels
        return int((counted != IGNORED).sum())

    def _weight(self, model: nn.Module, labels: Any) -> Weight:
        return self.weight or weight_of(model, labels)


def weight_of(model: nn.Module, labels: Any) -> Weight:
    """Return what a model's loss is assumed to be a mean over: "rows", "labels", ..."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return "rows"
    return "shifted_labels" if labels.dim() > 1 and _shifts_labels(model) else "labels"


def _shifts_labels(model: nn.Module) -> bool:
    """Return whether the model compares each output with the label of the next position."""
    wrapped = getattr(model, "get_base_model", None)  # of peft
    inner = wrapped() if callable(wrapped) else model
    names = [kind.__name__ for kind in type(inner).__mro__]
    if any(name.endswith("ForCausalLM") or name in _CAUSAL for name in names):
        return True
    # With a text encoder, labels are at the place of their prediction; not so with an image
    # encoder.
    has_encoder = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    return any(name.endswith("ForConditionalGeneration") for name in names) and not has_encoder


def _loss_of(outputs: Any, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        keys = ", ".join(map(str, batch))
        text = f"model wants {type(model).__name__} to return a loss, and it returned none for a "
        raise InvalidInputError.at("loss", f"{text}batch of {keys}")
    return one_number(loss, "the loss")


def _output(outputs: Any) -> Any:
    """Return the output for metrics and predictions from a model's results."""
    given = outputs if isinstance(outputs, Mapping) else vars(outputs)
    if given.get("logits") is not None:
        return given["logits"]
    return {key: value for key, value in given.items() if key != "loss"}

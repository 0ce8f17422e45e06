"""The loss that a model returns itself, as those of transformers do, and what it is a mean over.

A sum over uneven parts equals one big batch only if each mean comes with the number of things that
it is a mean over. Models do not say it, so it is counted in the labels of the batch, by a rule that
is a function of the model's class and the labels' type alone. Must not know shards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.engine.objectives.losses import Assessment, LossValue, one_number
from stratagem.worker.user_code.call_notes import noted

Weight = Literal["rows", "labels", "shifted_labels"]

IGNORED: Final = -100
"""A label that counts nothing."""
_CAUSAL: Final = frozenset(
    {"BertLMHeadModel", "CTRLLMHeadModel", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel"}
)
"""Causal language models of transformers that are not called `...ForCausalLM`."""


@dataclass(frozen=True, slots=True)
class ReturnedLoss:
    """The objective of a job with `loss: {name: model}`: `model(**batch).loss`.

    weight: what the loss is a mean over; None: what `weight_of` says. Where that is nothing, the
    loss is 0 and has no gradient, whatever the model returned.
    """

    weight: Weight | None

    @property
    def is_users(self) -> bool:
        """Always true: the model's code computes the loss."""
        return True

    @property
    def counts_rows(self) -> bool:
        """True if the job says so; otherwise the labels decide."""
        return self.weight == "rows"

    @property
    def may_log(self) -> bool:
        """Always false: a model returns nothing to log."""
        return False

    def __call__(self, model: nn.Module, x: Any, y: Any, num_rows: int) -> LossValue:
        """An `Objective`."""
        return self._run(model, x, y, num_rows)[0]

    def evaluate(
        self, model: nn.Module, x: Any, y: Any, num_rows: int, *, wants_output: bool
    ) -> Assessment:
        """Computes the loss of a batch. For metrics the output is its `logits`, or all that it
        gives besides the loss; the target is `labels`, each where the model predicts it."""
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
        if not counted:  # transformers makes NaN of it; this goes backward to nothing
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
    """Returns what the loss of a model is taken to be a mean over, unless the job says it."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return "rows"
    return "shifted_labels" if labels.dim() > 1 and _shifts_labels(model) else "labels"


def _shifts_labels(model: nn.Module) -> bool:
    """Returns whether the model compares its output at a place with the label of the next one."""
    wrapped = getattr(model, "get_base_model", None)  # of peft
    inner = wrapped() if callable(wrapped) else model
    names = [kind.__name__ for kind in type(inner).__mro__]
    if any(name.endswith("ForCausalLM") or name in _CAUSAL for name in names):
        return True
    # With an encoder of text, labels stand where they are predicted; with one of images they do
    # not.
    has_encoder = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    return any(name.endswith("ForConditionalGeneration") for name in names) and not has_encoder


def _loss_of(outputs: Any, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None:
        keys = ", ".join(map(str, batch))
        text = f"model wants {type(model).__name__} to return a loss, and it returned none for a "
        raise InvalidInputError.at("loss", f"{text}batch of {keys}")
    return one_number(found, "the loss")


def _output(outputs: Any) -> Any:
    """Returns what metrics and predictions are made of."""
    given = outputs if isinstance(outputs, Mapping) else vars(outputs)
    if given.get("logits") is not None:
        return given["logits"]
    return {key: value for key, value in given.items() if key != "loss"}

"""Check and convert the tensors of a model: their dtypes, and the kinds that a model may hold.

The floats of a model keep their original dtypes, unless the job's precision converts them. Rows
follow their model.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stratagem.common.base.errors import InvalidInputError, UserCodeError, Violation
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import LAYS_OUT_PARAMETERS
from stratagem.common.tensors.manifest import DTYPES

# ---- Dtypes of a model ----

_OF_ROWS: Final = (torch.float32, torch.float64)


def converted_dtype(job: JobSpec) -> torch.dtype | None:
    """Return the dtype that the job's precision gives to all floats; None if they keep theirs."""
    match job.execution.precision:
        case None:
            return None
        case "Full":
            return torch.float64
        case _:
            return torch.float32


def rows_dtype(job: JobSpec, model: nn.Module) -> torch.dtype | None:
    """Return the dtype of floats in rows for this model; None if rows keep the dtype of the data.

    Without a precision, rows get the model's dtype if that is float32 or float64 throughout. Other
    models get the data's, since rounding to 16 bits would spoil targets.
    """
    wanted = converted_dtype(job)
    if wanted is not None:
        return wanted
    dtypes = set(dtypes_of(model)) or {torch.float32}
    (only, *others) = dtypes
    return only if not others and only in _OF_ROWS else None


def dtypes_of(model: nn.Module) -> Counter[torch.dtype]:
    """Return the number of floating-point tensors of each dtype in the model."""
    return Counter(tensor.dtype for _, tensor in _floats(model))


def convert(model: nn.Module, job: JobSpec) -> str:
    """Convert the model to the job's precision, in place; return a sentence on changes, or ""."""
    wanted = converted_dtype(job)
    if wanted is None:
        return ""
    changed = dtypes_of(model)
    del changed[wanted]
    # `Module.to` would drop the imaginary part of complex numbers.
    model._apply(lambda tensor: tensor.to(wanted) if tensor.is_floating_point() else tensor)
    if not changed:
        return ""
    dtypes = " and ".join(
        f"{counted(number, 'tensor')} of {name_of(dtype)}" for dtype, number in changed.items()
    )
    return (
        f"{job.execution.precision} converts {dtypes} of the model to {name_of(wanted)}; without a "
        "precision they keep their dtypes"
    )


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype for messages, as "float32"."""
    return str(dtype).removeprefix("torch.")


def _floats(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor


# ---- Kinds of tensors and modules ----
#
# The checks run when a factory has made a model: in `stratagem check`, when a run's model is built,
# and on each worker that builds it again, so all of them report the same sentence. Properties that
# appear only during training are checked whenever the state is saved.

_FIELD: Final = "model"
_ALLOWED: Final = tuple(dtype.name for dtype in DTYPES)
_EXTRA: Final = "_extra_state"
_KEPT_LAYOUT: Final = (
    "it stays so, since the run began under earlier rules, by which updates of such parameters are "
    "wrong where gradients are exchanged; a new run makes it contiguous"
)
_NOT_KEPT: Final = (
    "a buffer that is built anew with the model can be registered with `persistent=False`"
)

NamedParams = Sequence[tuple[str, nn.Parameter]]


def check_tensors(model: nn.Module) -> None:
    """Raise InvalidInputError that lists tensors that cannot be trained, stored or sent exactly."""
    refused = list(_without_shape(model)) or [*_unusual(model), *_in_common(model)]
    if refused:
        raise InvalidInputError(violations=[Violation(_FIELD, text) for text in refused])


def make_plain(model: nn.Module, numerics: int) -> list[str]:
    """Replace parts of the model by plainer ones with the same values; return a sentence about
    each.

    Embeddings with sparse gradients get dense ones. Parameters become contiguous, since kernels and
    exchanges read memory in order; runs under earlier rules (`numerics`) keep their layout.
    """
    notes = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            module.sparse = False
            text = "gradients are exchanged dense, so this embedding makes dense ones"
            notes.append(f'module "{name}": sparse=True is left out: {text}')
    for name, param in model.named_parameters():
        if not param.is_contiguous():
            text = _KEPT_LAYOUT
            if numerics >= LAYS_OUT_PARAMETERS:
                param.data = param.data.contiguous()
                text = "it is made so, with the same values"
            notes.append(f'parameter "{name}" is not contiguous in memory: {text}')
    return notes


def refuse_sparse_gradients(named: NamedParams) -> None:
    """Raise InvalidInputError if backward has left a sparse gradient, as with `sparse=True`."""
    for name, param in named:
        if param.grad is not None and param.grad.layout is not torch.strided:
            layout = _text(param.grad.layout)
            text = (
                f'parameter "{name}" got a gradient of layout {layout}; gradients are exchanged '
                "dense: call the function without `sparse=True`, or make the gradient dense with "
                "`to_dense()`"
            )
            raise InvalidInputError.at(_FIELD, text)


@dataclass(slots=True)
class ModelForm:
    """The parts of a model that must not change while it is trained: trained parameters, tensors of
    the state, and the content of `get_extra_state`."""

    model: nn.Module
    params: NamedParams
    _layout: Mapping[str, object] = field(init=False)
    _extra: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._layout = _layout_of(_state_of(self.model))
        self.note_extra()

    def note_extra(self) -> None:
        """Remember the content of `get_extra_state`; called after loading a state."""
        extra = _extra_of(_state_of(self.model))
        self._extra = {name: value.clone() for name, value in extra.items()}

    def check(self) -> None:
        """Raise UserCodeError if training has changed these parts, since the state would no longer
        fit the model that the job builds."""
        for text in self._changes():
            raise UserCodeError("ValueError", text)

    def _changes(self) -> Iterator[str]:
        live = {name: param for name, param in self.model.named_parameters()}
        trained = dict(self.params)
        for name, param in trained.items():
            now = live.get(name)
            if now is not param:
                how = "is no longer there" if now is None else "was replaced by another tensor"
                yield f'parameter "{name}" {how} in training; change its values in place'
            elif not now.requires_grad:
                yield f'parameter "{name}" was frozen in training; {_WHEN_FROZEN}'
        for name, param in live.items():
            if name not in trained and param.requires_grad:
                yield f'parameter "{name}" was made trainable in training; {_WHEN_FROZEN}'
        state = _state_of(self.model)
        layout = _layout_of(state)
        for name in sorted(layout.keys() ^ self._layout.keys()):
            text = "register all buffers and parameters when the model is made"
            yield f'"{name}" came into the state or left it in training; {text}'
        for name, form in layout.items():
            if form != self._layout.get(name):
                yield f'"{name}" changed its shape or type in training; a state has one layout'
        for name, value in _extra_of(state).items():
            before = self._extra.get(name)
            if before is None or not _are_same(value, before):
                text = "workers compute different shards; what changes must be a buffer"
                yield f'"{name}", which get_extra_state returns, changed in training: {text}'


_WHEN_FROZEN: Final = (
    "the parameters that are trained are chosen when the model is made: by requires_grad there, by "
    "model.freeze, or by turns"
)


def _without_shape(model: nn.Module) -> Iterator[str]:
    """Yield a sentence about each lazy module without shape, which has not seen a batch yet."""
    for name, module in model.named_modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and is_lazy(tensor) for tensor in tensors):
            kind = type(module).__name__
            yield (
                f'module "{name}" ({kind}) has parameters without a shape, which a lazy module '
                "gets from its first batch; call the model on one in the factory, or give the sizes"
            )


def _unusual(model: nn.Module) -> Iterator[str]:
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict(keep_vars=True).items():
        label = f'parameter "{name}"' if name in params else f'state_dict()["{name}"]'
        hint = "" if name in params else f"; {_NOT_KEPT}"
        if not isinstance(value, Tensor):
            where = ", from get_extra_state" if _is_extra(name) else ""
            yield f"{label} is a {type(value).__name__}{where}; all state must be tensors"
        elif value.layout is not torch.strided:
            text = "allowed is strided, which `to_dense()` makes"
            yield f"{label} is a tensor of layout {_text(value.layout)}; {text}{hint}"
        elif _text(value.dtype) not in _ALLOWED:
            real = "; `torch.view_as_real` makes two floats of each" if value.is_complex() else ""
            allowed = ", ".join(_ALLOWED)
            yield f"{label} is of {_text(value.dtype)}; allowed are {allowed}{real}{hint}"
        elif _overlaps(value):
            text = "as after `expand` or `unfold`; `clone()` gives each its own"
            yield f"{label} has several elements in one place of memory, {text}{hint}"


def _in_common(model: nn.Module) -> Iterator[str]:
    """Yield a sentence about different parameters that overlap in memory, which workers could not
    train alike."""
    params = [(n, p) for n, p in model.named_parameters() if p.layout is torch.strided]
    trained = [pair for pair in params if pair[1].requires_grad]
    pairs = [*_overlapping(trained)]
    pairs += [pair for pair in _overlapping(params) if not all(p.is_contiguous() for _, p in pair)]
    for (other, _), (name, _) in pairs:
        text = "to tie them, give both modules the one nn.Parameter; else `clone()` one of them"
        yield f'parameters "{other}" and "{name}" are different ones in the same memory; {text}'


def _overlapping(
    params: NamedParams,
) -> Iterator[tuple[tuple[str, nn.Parameter], tuple[str, nn.Parameter]]]:
    """Yield pairs of parameters whose memory overlaps."""
    last: dict[int, tuple[int, tuple[str, nn.Parameter]]] = {}
    for name, param in sorted(params, key=lambda pair: pair[1].storage_offset()):
        if not param.numel():
            continue
        start = int(param.storage_offset()) * param.itemsize
        sides = zip(param.stride(), param.shape, strict=True)
        end = start + (1 + sum(stride * (size - 1) for stride, size in sides)) * param.itemsize
        storage = memory_of(param)
        before, other = last.get(storage, (0, (name, param)))
        if start < before:
            yield other, (name, param)
        if end > before:
            last[storage] = (end, (name, param))


def memory_of(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's memory, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def _overlaps(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor may be at the same place in memory."""
    if tensor.numel() == 0:
        return False
    extent = 0
    sides = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(side for side in sides if side[1] != 1):
        if stride <= extent:
            return True
        extent += (size - 1) * stride
    return False


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    # keep_vars, since the values of parameters may be absent here.
    return dict(model.state_dict(keep_vars=True))


def _layout_of(state: Mapping[str, Tensor]) -> dict[str, object]:
    return {name: (value.shape, value.dtype) for name, value in state.items()}


def _extra_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `get_extra_state` has put into a state."""
    return {name: value for name, value in state.items() if _is_extra(name)}


def _is_extra(name: str) -> bool:
    """Return whether a name in a state is that of `get_extra_state`, not of a tensor."""
    return name.rpartition(".")[2] == _EXTRA


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal elements; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _text(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")

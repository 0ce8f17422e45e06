"""What a call was given, added to the error that it raises: types and shapes, and no value.

Also says what to write in place of the mistakes that are made most often. Owns the words; where the
user's code runs is marked by `user_code`, which tells notes with the message.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stratagem.common.base.errors import StratagemError

_NUM_ITEMS: Final = 8
"""How many items of a dict or a list are told."""
_MAX_DEPTH: Final = 4


class noted:  # reads as a statement
    """Adds to an error what the callee was called with. A class, since it is entered in each step.

    callee: a module, or words for it. given: its one argument. model: the modules that it calls,
    where the callee is none.
    """

    __slots__ = ("_callee", "_given", "_model")

    def __init__(self, callee: object, given: object, model: nn.Module | None = None) -> None:
        self._callee, self._given = callee, given
        self._model = callee if isinstance(callee, nn.Module) else model

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, StratagemError):
            is_model = isinstance(self._callee, nn.Module)
            name = f"model {type(self._callee).__name__}" if is_model else self._callee
            hint = "" if self._model is None else input_hint(str(error), self._given, self._model)
            error.add_note(f"{name} was called with {text_of(self._given)}{hint}")


def text_of(value: Any, depth: int = 0) -> str:
    """Return the type and shape of each tensor in a value, in its nesting: "(float32[8, 4],
    int64[8])"; of anything else its type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if not isinstance(value, Mapping | tuple | list) or depth == _MAX_DEPTH:
        return type(value).__name__
    if isinstance(value, Mapping):
        parts = [f"{key!r}: {text_of(value[key], depth + 1)}" for key in list(value)[:_NUM_ITEMS]]
    else:
        parts = [text_of(item, depth + 1) for item in value[:_NUM_ITEMS]]
    if len(value) > _NUM_ITEMS:
        parts.append(f"… {len(value):,} in all")
    opening, closing = (
        "{}" if isinstance(value, Mapping) else "()" if isinstance(value, tuple) else "[]"
    )
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return f"{opening}{', '.join(parts)}{comma}{closing}"


def input_hint(text: str, given: object, model: nn.Module) -> str:
    """Return what to write instead where a model's error says that it was not made for its input;
    "" where the error says no such thing."""
    if isinstance(given, Mapping | list | tuple) and _IS_OF_TYPE.search(text):
        kind = type(given).__name__
        return (
            f"; each batch is one {kind}, and that is the model's one argument: take it apart in "
            "forward; or return pairs (x, y) as rows or from data.collate; or write a `step`"
            + (", or `loss: model` for model(**batch).loss" if isinstance(given, Mapping) else "")
        )
    if _LACKS_ARGUMENT.search(text):
        return (
            "; of a batch (x, y) the model gets x, as its one argument, and the loss gets y: take "
            "a tuple or dict x apart in forward, or call the model in a `step`"
        )
    if _IS_ABOUT_DTYPES.search(text):
        return _dtype_hint(given, model)
    if "index out of range in self" in text and isinstance(given, Tensor) and given.numel():
        return f"; an embedding has fewer rows: the largest number in x is {given.max().item():g}"
    return ""


def _dtype_hint(given: object, model: nn.Module) -> str:
    """Return what to write instead where the dtypes of rows and model do not fit; "" where their
    floats are the same."""
    rows = _float_dtypes(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
    own = _float_dtypes([*model.parameters(), *model.buffers()])
    if not rows:
        return "; convert x to the dtype that the layer takes, in data.entrypoint or in forward"
    if rows.keys() == own.keys():
        return ""
    return (
        f"; the floats of the rows are {_names(rows)}, those of the model {_names(own)}: convert "
        "them in the data or in the model, or set execution.precision, which converts both"
    )


def _float_dtypes(tensors: Iterable[Tensor]) -> Counter[str]:
    return Counter(
        str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()
    )


def _names(dtypes: Counter[str]) -> str:
    return " and ".join(sorted(dtypes)) or "none"


_IS_ABOUT_DTYPES: Final = re.compile(r"dtype|scalar type|Input type", re.IGNORECASE)
_IS_OF_TYPE: Final = re.compile(
    r"not (dict|list|tuple|\w*(Encoding|Batch))\b|'(dict|list|tuple)' object has no attribute"
    r"|(dict|list|tuple) indices|unsupported operand"
)
_LACKS_ARGUMENT: Final = re.compile(r"missing \d+ required (positional|keyword-only) argument")

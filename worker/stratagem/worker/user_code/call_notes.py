"""Add the arguments of a call to the error that it raises: types and shapes, never values.

For the most frequent mistakes the remedy is added. The places where the user's code runs are marked
by `user_code`, which reports the notes with the message.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stratagem.common.base.errors import StratagemError

_NUM_ITEMS: Final = 8
"""Maximum number of items of a dict or list in a note."""
_MAX_DEPTH: Final = 4
_TABLES: Final = (nn.Embedding, nn.EmbeddingBag)


class noted:  # reads as a statement
    """Context manager that adds a call's arguments to its error; a class for speed.

    callee: a module, or a name. given: the only argument. model: the called modules, if the callee
    is not a module.
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
            # This uses objects of the user, which may raise anything; the first error is reported.
            with suppress(Exception):
                error.add_note(self._note(error))

    def _note(self, error: Exception) -> str:
        is_model = isinstance(self._callee, nn.Module)
        name = f"model {type(self._callee).__name__}" if is_model else self._callee
        hint = "" if self._model is None else input_hint(str(error), self._given, self._model)
        return f"{name} was called with {text_of(self._given)}{hint}"


def text_of(value: Any, depth: int = 0) -> str:
    """Return the type and shape of each tensor in a value, in its nesting, as "(float32[8, 4],
    int64[8])"; for anything else its type. Keys are included only if they are names, not data."""
    if isinstance(value, Tensor):
        sides = "[nested]" if value.is_nested else list(value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}{sides}"
    if not isinstance(value, Mapping | tuple | list) or depth == _MAX_DEPTH:
        return type(value).__name__
    if isinstance(value, Mapping):
        keys = list(value)[:_NUM_ITEMS]
        parts = [f"{_key_text(key)}: {text_of(value[key], depth + 1)}" for key in keys]
    else:
        parts = [text_of(item, depth + 1) for item in value[:_NUM_ITEMS]]
    if len(value) > _NUM_ITEMS:
        parts.append(f"… {len(value):,} in all")
    opening, closing = (
        "{}" if isinstance(value, Mapping) else "()" if isinstance(value, tuple) else "[]"
    )
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return f"{opening}{', '.join(parts)}{comma}{closing}"


def _key_text(key: object) -> str:
    """Return a key if it is a name; for any other key its type."""
    return repr(key) if type(key) is str and key.isidentifier() else type(key).__name__


def input_hint(text: str, given: object, model: nn.Module) -> str:
    """Return a remedy if the error means that an input does not fit the model; else ""."""
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
    if "index out of range in self" in text:
        tables = [emb for emb in model.modules() if isinstance(emb, _TABLES)]
        sizes = " or ".join(str(size) for size in sorted({emb.num_embeddings for emb in tables}))
        rows = f"; of its embeddings each has {sizes} rows" if sizes else ""
        return f"; an index in x is below 0 or beyond the rows of an embedding{rows}"
    return ""


def _dtype_hint(given: object, model: nn.Module) -> str:
    """Return a remedy if rows and model have different float dtypes; else ""."""
    rows = _float_dtypes(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
    kinds = _float_dtypes([*model.parameters(), *model.buffers()])
    if not rows:
        return "; convert x to the dtype that the layer takes, in data.entrypoint or in forward"
    if rows.keys() == kinds.keys():
        return ""
    return (
        f"; the floats of the rows are {_names(rows)}, those of the model {_names(kinds)}: convert "
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

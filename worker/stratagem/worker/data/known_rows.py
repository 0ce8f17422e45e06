"""Rows of which it is known that nothing is drawn at random while they are fetched or collated.

They are what lists, arrays and the plain data sets of torch hold: no code runs but theirs. Whoever
reads such rows need not seed the generators, which takes as long as fetching them. A row of the
user's own class may read a generator without a trace in its state, as `torch.initial_seed()` does,
so whether it has drawn cannot be seen afterwards.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

_ARRAYS: Final = frozenset({Tensor, np.ndarray, np.memmap})
_LEAVES: Final = _ARRAYS | {int, float, bool, str, bytes, np.float32, np.float64, np.int64}
_COLLATES: Final = dict(default_collate_fn_map)
"""How `default_collate` makes a batch of each type, before anybody has changed it."""


def rows_without_draws(source: Any, numbers: Sequence[int]) -> list[Any] | None:
    """Returns these rows; None where fetching them may run code of the user's, or fails."""
    if not _is_plain(source):
        return None
    try:
        rows = [source[number] for number in numbers]
    except Exception:  # whoever fetches them one by one says which it was
        return None
    # Of a memory map, rows may be read-only views, which torch warns of.
    return [np.array(row) if isinstance(row, np.ndarray) else row for row in rows]


def draws_nothing(collate: Callable[[list[Any]], Any], rows: list[Any]) -> bool:
    """Returns whether a batch is made of these rows by torch's code alone."""
    is_torchs = collate is default_collate and default_collate_fn_map == _COLLATES
    return is_torchs and _are_values(rows)


def _is_plain(source: Any) -> bool:
    """Returns whether `source[number]` runs no code but Python's, numpy's and torch's. When in
    doubt, False."""
    kind = type(source)
    if kind is TensorDataset:
        return all(type(tensor) is Tensor for tensor in source.tensors)
    if kind is Subset:
        return type(source.indices) in (list, range) and _is_plain(source.dataset)
    if kind is ConcatDataset:
        return all(map(_is_plain, source.datasets))
    return kind is list or kind in _ARRAYS


def _are_values(values: list[Any]) -> bool:
    """Returns whether there is nothing in these values but arrays, numbers and texts in dicts with
    texts as keys, lists and tuples."""
    nested = set(map(type, values)) - _LEAVES
    if not nested:
        return True
    if not nested <= {dict, list, tuple}:
        return False
    dicts = [value for value in values if type(value) is dict] if dict in nested else []
    others = [value for value in values if type(value) in (list, tuple)] if nested != {dict} else []
    inner = chain(chain.from_iterable(map(dict.values, dicts)), chain.from_iterable(others))
    keys: set[Any] = set().union(*dicts)
    return all(type(key) is str for key in keys) and _are_values(list(inner))

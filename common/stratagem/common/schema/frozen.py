"""Plain JSON values that cannot be changed: a parsed document is shared by all who read it.

A frozen mapping or list is a dict or list to every reader (it compares, iterates and dumps like
one), and is hashable; what would change it raises. `thawed` makes the fresh plain copy that
foreign code is given. Knows no document.
"""

from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeVar

_T = TypeVar("_T")

_LEAVES: Final = frozenset({str, int, float, bool, type(None)})
"""Asked of every element, as a user's loss gets a fresh list of weights in every micro-batch."""


def _refuse(self: object, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise TypeError(f"{self!r} belongs to a document and cannot be changed; change a copy of it")


class FrozenDict(dict[str, Any]):
    """A mapping of frozen values."""

    __slots__ = ()

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __copy__(self) -> "FrozenDict":
        return self

    def __deepcopy__(self, _memo: object) -> "FrozenDict":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)  # else pickle would put the items in one by one


class FrozenList(list[Any]):
    """A list of frozen values."""

    __slots__ = ()

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = _refuse
    remove = reverse = sort = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __copy__(self) -> "FrozenList":
        return self

    def __deepcopy__(self, _memo: object) -> "FrozenList":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenList, (list(self),)


def frozen(value: _T) -> _T:
    """Return the same JSON value with nothing in it that can be changed."""
    made: Any = value
    if isinstance(value, FrozenDict | FrozenList):
        return value
    if isinstance(value, Mapping):
        made = FrozenDict({key: frozen(item) for key, item in value.items()})
    elif isinstance(value, list | tuple):
        made = FrozenList(frozen(item) for item in value)
    result: _T = made
    return result


def thawed(value: _T) -> _T:
    """Return the same JSON value as fresh dicts and lists, which the caller may change."""
    made: Any = value
    if isinstance(value, Mapping):
        made = {key: item if type(item) in _LEAVES else thawed(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        made = [item if type(item) in _LEAVES else thawed(item) for item in value]
    result: _T = made
    return result

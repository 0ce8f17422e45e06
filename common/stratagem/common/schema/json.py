"""Read and write JSON strictly, and freeze parsed values."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from stratagem.common.base import ids
from stratagem.common.base.errors import InvalidInputError, Violation

# ---- Text ----
#
# Duplicate keys, NaN and infinities, lone surrogates and bottomless nesting are refused, on
# reading and on writing, unlike in the standard library. This section also suggests a name for a
# misspelt one.

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

MAX_DEPTH: Final = 64
MAX_VALUES: Final = 2**16
"""The largest number of values in one text: a megabyte of brackets takes many seconds to read."""
_MAX_PATHS: Final = 3
"""The largest number of paths that the error message for an unknown key suggests."""


def load_json(text: str, field: str = "") -> JSON:
    """Parse JSON text; `field` names the document in the error."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except InvalidInputError as error:
        raise InvalidInputError(violations=under(field, error.violations)) from None
    except ValueError as error:
        raise InvalidInputError.at(field, f"not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidInputError.at(field, f"nested deeper than {MAX_DEPTH} levels") from None
    _check_number_of_values(value, field)
    return check_json(value, field)


def dump_json(value: JSON) -> str:
    """Return compact JSON text, keys in the order of the value."""
    return json.dumps(check_json(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def check_json(value: object, field: str = "", depth: int = 0) -> JSON:
    """Return the value if it can be written as JSON and read back equal; tuples become lists."""
    if depth > MAX_DEPTH:
        raise InvalidInputError.at(field, f"nested deeper than {MAX_DEPTH} levels")
    match value:
        case None | bool() | int():
            return value
        case float():
            if not math.isfinite(value):
                raise InvalidInputError.at(field, f"{value} is not a finite number")
            return value
        case str():
            return check_text(value, field)
        case list() | tuple():
            return [_inside(item, i, field, depth) for i, item in enumerate(value)]
        case dict():
            return {
                check_key(key, field): _inside(item, key, field, depth)
                for key, item in value.items()
            }
        case _:
            raise InvalidInputError.at(
                field, f"{value!r} ({type(value).__name__}) has no JSON form"
            )


def _inside(value: object, place: int | str, field: str, depth: int) -> JSON:
    """Check one item of a list or mapping; build its path only if the item is wrong."""
    try:
        return check_json(value, "", depth + 1)
    except InvalidInputError as error:
        path = join(field, f"[{place}]" if isinstance(place, int) else place)
        raise InvalidInputError(violations=under(path, error.violations)) from None


def _check_number_of_values(value: object, field: str) -> None:
    num_values, open_values = 0, [value]
    while open_values:
        item = open_values.pop()
        num_values += 1
        if isinstance(item, dict | list):
            open_values.extend(item.values() if isinstance(item, dict) else item)
        if num_values + len(open_values) > MAX_VALUES and ids.are_checked():
            raise InvalidInputError.at(field, f"has more than {MAX_VALUES} values")


def check_key(key: object, field: str) -> str:
    """Return the key of an object, which must be text in JSON."""
    if not isinstance(key, str):
        raise InvalidInputError.at(field, f"the key {key!r} is not text")
    return check_text(key, field)


def check_text(value: str, field: str) -> str:
    """Return the text if it is valid Unicode: half a surrogate pair cannot be sent as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInputError.at(field, f"{value!a} is not valid Unicode text") from None
    return value


def sort_keys(value: JSON) -> JSON:
    """Return the same value with the keys of every object sorted."""
    match value:
        case dict():
            return {key: sort_keys(value[key]) for key in sorted(value)}
        case list():
            return [sort_keys(item) for item in value]
        case _:
            return value


def join(path: str, name: str) -> str:
    """Return a dotted field path; list positions such as "[0]" are appended without a dot."""
    if not path or not name:
        return path or name
    return f"{path}{name}" if name.startswith("[") else f"{path}.{name}"


def under(path: str, violations: Iterable[Violation]) -> tuple[Violation, ...]:
    """Return an inner value's violations, their fields prefixed by its `path` in the document."""
    return tuple(
        Violation(join(path, violation.field), violation.message) for violation in violations
    )


def item_of(items: list[JSON], key: str) -> int | None:
    """Return the index of the list item that one part of a path names, by its index or its `name`;
    None if there is none."""
    if key.isascii() and key.isdigit():
        return int(key) if int(key) < len(items) else None
    named = (i for i, item in enumerate(items) if isinstance(item, dict) and _name(item) == key)
    return next(named, None)


def no_item(items: list[JSON], key: str) -> str:
    """Return the error message for a list that has no item of this index or name."""
    names = [str(_name(item)) for item in items if isinstance(item, dict) and _name(item)]
    named = f", named {', '.join(names)}" if names else ""
    places = f"0 to {len(items) - 1}" if items else "none"
    return f"has no item {key!r}; its items are {places}{named}"


def _name(item: dict[str, JSON]) -> JSON:
    return item.get("name")


def in_order(violations: Iterable[Violation], document: JSON) -> list[Violation]:
    """Return the violations sorted by the position of their fields in the document; missing fields
    come last in their mapping."""
    return sorted(violations, key=lambda violation: tuple(_places(violation.field, document)))


def _places(path: str, value: JSON) -> Iterator[int]:
    """Yield, for each part of a path, the position of the named item among its siblings; a last
    part that does not exist comes last."""
    while path and isinstance(value, dict | list):
        if isinstance(value, list):
            number, _, path = path.removeprefix("[").partition("]")
            place = int(number) if number.isdecimal() else len(value)
            inside = value[place] if place < len(value) else None
        else:
            # A key may hold a dot, and the document may hold its beginning as another key.
            keys = [key for key in value if path == key or path.startswith((f"{key}.", f"{key}["))]
            key = max(keys, key=len, default=path)
            place = list(value).index(key) if keys else len(value)
            inside, path = value.get(key), path.removeprefix(key)
        yield place
        path, value = path.removeprefix("."), inside


def closest(word: str, names: Iterable[str]) -> str | None:
    """Return the known name that is spelt much like a word; None if there is none."""
    by_lower = {name.lower(): name for name in names}
    close = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def suggest(word: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" if a known name is close to the word, else ""."""
    name = closest(word, names)
    return "" if name is None else f"; did you mean {name}?"


def not_one_of(value: object, choices: Iterable[str]) -> str:
    """Return the error message for a value that is not among the known names."""
    names = tuple(choices)
    hint = suggest(value, names) if isinstance(value, str) else ""
    return f"{value!r} is not one of {', '.join(names)}{hint}"


def unknown_key(key: str, keys: Iterable[str], elsewhere: Sequence[str] = ()) -> str:
    """Return the error message for an unknown key of a document. elsewhere: paths in other sections
    that have such a key; an exact match there is suggested before a similar name here."""
    names = tuple(keys)
    there = f"; did you mean {' or '.join(elsewhere[:_MAX_PATHS])}?" if elsewhere else ""
    is_exact = any(path.endswith(f".{key}") for path in elsewhere)
    hint = there if is_exact else suggest(key, names) or there
    return f"unknown key{hint or '; known: ' + (', '.join(names) or 'none')}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InvalidInputError.at(key, "duplicate key")
        result[key] = value
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


# ---- Frozen values ----
#
# All readers of a parsed document share it, so its values cannot be changed.
#
# A frozen mapping or list is a dict or list to every reader (it compares, iterates and dumps like
# one), and is hashable; changing it raises. `thawed` makes the fresh plain copy that foreign code
# is given.

_T = TypeVar("_T")

_LEAVES: Final = frozenset({str, int, float, bool, type(None)})
"""The types of values that need no freezing; a set, as it is consulted for every list element."""


def _refuse(self: object, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise TypeError(f"{self!r} belongs to a document and cannot be changed; change a copy of it")


class FrozenDict(dict[str, Any]):
    """An immutable dict whose values are frozen, too."""

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
    """An immutable list whose items are frozen, too."""

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
    """Return the same JSON value, immutable at every depth."""
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

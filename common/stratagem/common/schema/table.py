"""Evaluate tables of rules: which parts of a document cannot be combined, and why.

A row of a table is a case and a sentence: the field that the case names first is refused with the
sentence if all conditions of the case hold.

    "evaluation when data.worker_local": "is not possible with privacy: ..."
    "no batch_size when no turns": "missing; for example batch_size: 32"
    "at optimizer.momentum: optimizer.kwargs.momentum": "..."     # reported at the first path

A condition is one of these, where paths lead through attributes and keys of mappings:

    data.readers                    # there, and not as it is by default
    execution.mode is Lazy|Hybrid   # the text, the number or the class of a value
    execution.mode is not Eager     # there, and another one
    steps <= initial.step           # both there; or a number, as in `aggregation.mu > 0`
    no data.worker_local            # the opposite of any of them

A path with `[]`, such as `turns[].name`, is evaluated for each item. A sentence shows values by
their paths: "{batch_size}", "{optimizer.clip_norm:g}", "{evaluation.metrics[]!r}".
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic_core import PydanticUndefined

from stratagem.common.base.errors import Violation
from stratagem.common.schema.rules import UnreadFieldError


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """A group of rows that apply only if the conditions `when` hold ("" = always). says: the
    sentence that they share, with the text of each row in place of {}."""

    when: str
    says: str
    rows: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Under:
    """A nested table of rules that applies only if the conditions `when` hold."""

    when: str
    table: "Table"


Table: TypeAlias = Iterable[Rules | Under | Callable[[Any], Iterable[Violation]]]
"""A list of row groups, nested tables, and functions for checks that no row can express."""

Path: TypeAlias = tuple[str | int, ...]
"""The path of a value: names of attributes, keys of mappings, and indices in lists."""


class Condition(NamedTuple):
    """A test of the value at a path: whether it is set, or how it compares with other values."""

    is_wanted: bool
    path: Path
    compare: str
    others: Path


class RuleRow(NamedTuple):
    """A parsed row of a table: a field, the conditions that refuse it, and the error message."""

    field: str
    conditions: tuple[Condition, ...]
    says: str


_CONDITION: Final = re.compile(r"(no )?(\S+)(?: (is not|is|[<>]=?|!=) (\S+))?")
_SHOWN: Final = re.compile(r"\{([a-z_][\w.\[\]]*)(!r)?(:g)?\}")
_STEPS: Final = re.compile(r"[^.\[\]]+")
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "!=": operator.ne,
}
_OF_ITEMS: Final = "[]"


# ---- Reading ----


def refusal_of(case: str, says: str) -> RuleRow:
    """Parse a row of a table of rules from its case and its sentence."""
    field, colon, when = case.removeprefix("at ").partition(": ")
    conditions = conditions_of(when if colon else case)
    if not colon:
        field = next(word for word in case.split() if word != "no")
    return RuleRow(field, conditions, says)


@lru_cache(maxsize=1024)
def conditions_of(text: str) -> tuple[Condition, ...]:
    """Parse the conditions of a row, which are joined by "when" and "and"."""
    return tuple(_condition(condition) for condition in re.split(" when | and ", text) if condition)


def _condition(text: str) -> Condition:
    matched = _CONDITION.fullmatch(text)
    if matched is None:
        raise ValueError(f"{text!r} is no condition")
    no, path, compare, other = matched.groups()
    split = steps_of if compare in _COMPARISONS else _choices
    return Condition(not no, steps_of(path), compare or "", split(other or ""))


def steps_of(path: str) -> Path:
    """Split the path of a value into its parts; list indices and other numbers become ints."""
    return tuple(int(step) if step.isdecimal() else step for step in _STEPS.findall(path))


def _choices(text: str) -> tuple[str, ...]:
    return tuple(text.lower().split("|"))


@cache
def _read(
    rules: Rules,
) -> tuple[tuple[Condition, ...], tuple[RuleRow, ...], tuple[tuple[str, str], ...]]:
    """Parse a group of rows: return its common conditions, its parsed rows, and its rows with `[]`,
    which stay unparsed until they are applied to each list item."""
    rows = [(case, rules.says.replace("{}", text)) for case, text in rules.rows.items()]
    plain = tuple(refusal_of(*row) for row in rows if _OF_ITEMS not in row[0])
    return conditions_of(rules.when), plain, tuple(row for row in rows if _OF_ITEMS in row[0])


# ---- Evaluation ----


def found_in(table: Table, made: Any) -> Iterator[Violation]:
    """Yield the violations of a table's rows in a document value. A row or function that reads an
    invalid field stops there."""
    for part in table:
        try:
            if isinstance(part, Under):
                if _hold(conditions_of(part.when), made):
                    yield from found_in(part.table, made)
            elif isinstance(part, Rules):
                conditions, rows, of_items = _read(part)
                if _hold(conditions, made):
                    yield from _refused(rows, made)
                    for case, says in of_items:
                        yield from _refused(_of_items(case, says, made), made)
            else:
                yield from part(made)
        except UnreadFieldError:
            continue


def _refused(rows: Iterable[RuleRow], made: Any) -> Iterator[Violation]:
    for row in rows:
        try:
            if _hold(row.conditions, made):
                text = _SHOWN.sub(lambda place: _text(place, made), row.says)
                yield Violation(row.field, text)
        except UnreadFieldError:
            continue


def _of_items(case: str, says: str, made: Any) -> Iterator[RuleRow]:
    """Yield a row of the table for each item of the list whose path has `[]` in the row's case."""
    path = next(word for word in case.split() if _OF_ITEMS in word).partition(_OF_ITEMS)[0]
    try:
        num_items = len(value_at(made, steps_of(path)) or ())
    except UnreadFieldError:
        return
    for place in range(num_items):
        number = f"[{place}]"
        yield refusal_of(case.replace(_OF_ITEMS, number), says.replace(_OF_ITEMS, number))


def _hold(conditions: Iterable[Condition], made: Any) -> bool:
    for is_wanted, path, compare, others in conditions:
        around, value = _at(made, path)
        if value is None:
            holds = False
        elif compare:
            holds = _compares(value, compare, others, made)
        else:
            holds = _is_said(around, path, value)
        if holds != is_wanted:
            return False
    return True


def _compares(value: Any, compare: str, others: Path, made: Any) -> bool:
    if compare in _COMPARISONS:
        bound = others[0] if isinstance(others[0], int) else value_at(made, others)
        return bound is not None and _COMPARISONS[compare](value, bound)
    return (shown(value).lower() in others) == (compare == "is")


def _is_said(around: Any, path: Path, value: Any) -> bool:
    """Return whether a value in the document is set, that is, differs from its default."""
    if value is False or value == ():
        return False
    kind: Any = type(around)
    return bool(value) if isinstance(around, dict) else value != _default(kind, path[-1])


def value_at(made: Any, path: Path) -> Any:
    """Return the value at a path; None if a part of the path is missing."""
    return _at(made, path)[1]


def _at(made: Any, path: Path) -> tuple[Any, Any]:
    """Return the object that holds the value at a path, and the value."""
    around = None
    for step in path:
        around = made
        if isinstance(step, int):
            made = made[step]
        elif isinstance(made, dict):
            made = made.get(step)
        else:
            made = getattr(made, step, None)
        if made is None:
            break
    return around, made


@lru_cache(maxsize=1024)
def _default(cls: Any, name: str | int) -> Any:
    info = getattr(cls, "__pydantic_fields__", {}).get(name)
    return PydanticUndefined if info is None else info.get_default(call_default_factory=True)


def shown(value: object) -> str:
    """Return the text for a value in messages and conditions; for a choice, its class's name."""
    is_choice = not isinstance(value, str) and hasattr(value, "__pydantic_fields__")
    return type(value).__name__ if is_choice else str(value)


def _text(place: re.Match[str], made: Any) -> str:
    path, as_written, as_number = place.groups()
    value = value_at(made, steps_of(path))
    return repr(value) if as_written else f"{value:g}" if as_number else shown(value)

"""Rules for the fields of frozen dataclasses: what a value may be, and the sentence if it is not.

A class declares a field as `steps: int = field(metadata=must(AT_LEAST_1))` and calls
`check_fields(self)` in `__post_init__`; a parser asks `field_violations` for all fields that it
could read, so that one answer names every wrong field. Knows no strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from stratagem.common.base import limits
from stratagem.common.base.errors import InvalidInputError, Violation

MAX_UNSIGNED: Final = 2**64 - 1

_KEY: Final = "rule"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """`holds` decides, `text` completes "<value> is not allowed; …"."""

    holds: Callable[[Any], bool]
    text: str


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_UNSIGNED


AT_LEAST_1: Final = FieldRule(_is_count, "must be >= 1")


def count_up_to(most: int) -> FieldRule:
    """A count of things that are kept one by one: without an end it would be an attack."""

    def holds(value: object) -> bool:
        return AT_LEAST_1.holds(value) and (not limits.are_checked() or value <= most)  # type: ignore[operator]

    return FieldRule(holds, f"must be >= 1 and <= {most}")


POSITIVE: Final = FieldRule(lambda v: _is_number(v) and v > 0, "must be > 0")
NOT_NEGATIVE: Final = FieldRule(lambda v: _is_number(v) and v >= 0, "must be >= 0")
FRACTION: Final = FieldRule(lambda v: _is_number(v) and 0 < v <= 1, "must be in (0, 1]")
ZERO_TO_ONE: Final = FieldRule(lambda v: _is_number(v) and 0 <= v <= 1, "must be in [0, 1]")
ZERO_TO_BELOW_1: Final = FieldRule(lambda v: _is_number(v) and 0 <= v < 1, "must be in [0, 1)")
NOT_EMPTY: Final = FieldRule(lambda v: len(v) > 0, "must not be empty")


def must(allowed: FieldRule) -> Mapping[str, FieldRule]:
    """Metadata of a dataclass field whose values obey the rule."""
    return {_KEY: allowed}


def field_violations(cls: Any, values: Mapping[str, object]) -> list[Violation]:
    """Return what is wrong with the given values of fields of the class; absent ones are not
    judged."""
    found = []
    for each in fields(cls):
        allowed = each.metadata.get(_KEY)
        if allowed is None or each.name not in values:
            continue
        value = values[each.name]
        if not allowed.holds(value):
            found.append(Violation(each.name, f"{value!r} is not allowed; {allowed.text}"))
    return found


def check_fields(value: Any) -> None:
    """Raise InvalidInputError if a field of the dataclass instance breaks its rule."""
    found = field_violations(
        value, {each.name: getattr(value, each.name) for each in fields(value)}
    )
    if found:
        raise InvalidInputError(violations=found)

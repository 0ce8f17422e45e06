"""The search space of a population: which hyperparameters there are and what they may be.

Owns the values, their validity and the JSON form shared with the Rust programs. Draws nothing:
sampling is for the strategy that explores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeAlias

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.field_rules import NOT_EMPTY, check_fields, must
from stratagem.common.schema.frozen import FrozenDict, frozen
from stratagem.common.schema.json_forms import (
    ANY_JSON,
    FLAG,
    REAL,
    TEXT,
    JsonForm,
    ObjectForm,
    list_of,
    plain,
    read_object,
    read_real,
    tagged,
)
from stratagem.common.schema.json_text import (
    JSON,
    check_json,
    load_json,
    not_one_of,
    sort_keys,
)


class Scale(StrEnum):
    """The scale on which values are spread between low and high."""

    LINEAR = "Linear"
    LOG = "Log"
    REVERSE_LOG = "ReverseLog"


@dataclass(frozen=True, slots=True)
class DimensionOptions:
    """structural: whether the value decides the layout of a model's state or its optimizer, so that
    it cannot be changed where a state is kept. None: that is for the strategy to find out."""

    structural: bool | None = None


@dataclass(frozen=True, slots=True)
class Float:
    """A number in [low, high]."""

    name: str = field(metadata=must(NOT_EMPTY))
    low: float
    high: float
    scale: Scale
    default: float | None = None
    options: DimensionOptions = DimensionOptions()

    def __post_init__(self) -> None:
        check_fields(self)
        _check_bounds(self.low, self.high, self.scale)
        if self.default is not None and not self.low <= self.default <= self.high:
            text = f"{self.default} is not between {self.low} and {self.high}"
            raise InvalidInputError.at("default", text)


@dataclass(frozen=True, slots=True)
class Int:
    """A whole number in [low, high]."""

    name: str = field(metadata=must(NOT_EMPTY))
    low: int
    high: int
    scale: Scale
    options: DimensionOptions = DimensionOptions()

    def __post_init__(self) -> None:
        check_fields(self)
        _check_bounds(self.low, self.high, self.scale)


@dataclass(frozen=True, slots=True)
class Categorical:
    """One of the choices."""

    name: str = field(metadata=must(NOT_EMPTY))
    choices: tuple[JSON, ...] = field(metadata=must(NOT_EMPTY))
    options: DimensionOptions = DimensionOptions()

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "choices", tuple(map(frozen, self.choices)))


@dataclass(frozen=True, slots=True)
class Ordinal:
    """One of the choices, which stand in order: each has neighbours. Ours; not in the Rust form."""

    name: str = field(metadata=must(NOT_EMPTY))
    choices: tuple[JSON, ...] = field(metadata=must(NOT_EMPTY))
    options: DimensionOptions = DimensionOptions()

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "choices", tuple(map(frozen, self.choices)))


@dataclass(frozen=True, slots=True)
class Conditional:
    """A dimension that is there only while the parent has one of these values."""

    name: str = field(metadata=must(NOT_EMPTY))
    parent: str = field(metadata=must(NOT_EMPTY))
    parent_values: tuple[JSON, ...] = field(metadata=must(NOT_EMPTY))
    dimension: Dimension

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "parent_values", tuple(map(frozen, self.parent_values)))


Dimension: TypeAlias = Float | Int | Categorical | Ordinal | Conditional


@dataclass(frozen=True, slots=True, eq=False)
class SearchSpace:
    """The dimensions that are searched, and hyperparameters that are frozen to a value.

    The order of the dimensions has no meaning: equal spaces may differ in it.
    """

    dimensions: tuple[Dimension, ...]
    frozen: Mapping[str, JSON] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "frozen", frozen(self.frozen))
        violations, seen = [], set(self.frozen)
        names = {each.name for each in self.dimensions}
        for i, each in enumerate(self.dimensions):
            if each.name in seen:
                text = f"{each.name!r} is taken already"
                violations.append(Violation(f"dimensions[{i}].name", text))
            seen.add(each.name)
            if isinstance(each, Conditional) and each.parent not in names - {each.name}:
                text = not_one_of(each.parent, sorted(names - {each.name}))
                violations.append(Violation(f"dimensions[{i}].parent", text))
        if violations:
            raise InvalidInputError(violations=violations)

    def in_order(self) -> SearchSpace:
        """Return the same space with its dimensions in order of name."""
        return replace(self, dimensions=tuple(sorted(self.dimensions, key=lambda each: each.name)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SearchSpace) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.in_order().dimensions, self.frozen


def parse_search_space(source: object, path: str = "search_space") -> SearchSpace:
    """A search space from its JSON text or from the parsed object."""
    value = load_json(source, path) if isinstance(source, str) else source
    space: SearchSpace = _SPACE.read(value, path)
    return space


def dump_search_space(space: SearchSpace) -> dict[str, JSON]:
    """Return the search space as a JSON object."""
    written = _SPACE.write(space)
    assert isinstance(written, dict)
    return written


def _check_bounds(low: float, high: float, scale: Scale) -> None:
    if not low < high:
        raise InvalidInputError.at("low", f"{low} is not below high, {high}")
    if scale is Scale.LOG and low <= 0:
        raise InvalidInputError.at("low", f"{low} is not allowed on a Log scale; must be > 0")


def _read_int(value: object, path: str) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise InvalidInputError.at(path, f"{value!r} is not a whole number of 64 bits")
    return value


def _read_scale(value: object, path: str) -> Scale:
    if not isinstance(value, str) or value not in [*Scale]:
        raise InvalidInputError.at(path, not_one_of(value, [*Scale]))
    return Scale(value)


def _read_default(value: object, path: str) -> float | None:
    return None if value is None else read_real(value, path)


def _read_frozen(value: object, path: str) -> Mapping[str, JSON]:
    read = check_json(dict(read_object(value, path)), path)
    assert isinstance(read, dict)
    return read


_INT: Final = JsonForm(_read_int, lambda value: value)
_SCALE: Final = JsonForm(_read_scale, str)
_DEFAULT: Final = JsonForm(_read_default, lambda value: value, is_optional=True)
# a conditional dimension holds another dimension: the form refers to itself
_INNER: Final = JsonForm(
    lambda value, path: _DIMENSION.read(value, path), lambda value: _DIMENSION.write(value)
)
_OPTIONS: Final = ObjectForm(DimensionOptions, {"structural": FLAG}, is_extras=True)
_DIMENSION: Final[JsonForm] = tagged(
    "dim_type",
    ObjectForm(
        Float,
        {"name": TEXT, "low": REAL, "high": REAL, "scale": _SCALE, "default": _DEFAULT},
        _OPTIONS,
    ),
    ObjectForm(Int, {"name": TEXT, "low": _INT, "high": _INT, "scale": _SCALE}, _OPTIONS),
    ObjectForm(Categorical, {"name": TEXT, "choices": list_of(ANY_JSON)}, _OPTIONS),
    ObjectForm(Ordinal, {"name": TEXT, "choices": list_of(ANY_JSON)}, _OPTIONS),
    ObjectForm(
        Conditional,
        {"name": TEXT, "parent": TEXT, "parent_values": list_of(ANY_JSON), "dimension": _INNER},
    ),
    extras_key="options",
)
_SPACE: Final = plain(
    ObjectForm(
        SearchSpace,
        {
            "dimensions": list_of(_DIMENSION),
            "frozen": JsonForm(_read_frozen, lambda value: sort_keys(check_json(dict(value)))),
        },
    )
)

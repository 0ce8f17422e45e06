"""This module defines the search space of a population: its hyperparameters and their possible
values.

It owns the values, their validity and the JSON form shared with the Rust programs. The strategy
that explores does the sampling.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WrapSerializer
from pydantic.dataclasses import rebuild_dataclass

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.document import (
    DocumentValue,
    FrozenJSON,
    Items,
    Kwargs,
    NonEmptyItems,
    NonEmptyText,
    NoOptions,
    Section,
    refuse,
)
from stratagem.common.schema.json import not_one_of, under
from stratagem.common.schema.rules import rule

# ---- Values ----


class Scale(StrEnum):
    """The scale on which values are spread between low and high."""

    LINEAR = "Linear"
    LOG = "Log"
    REVERSE_LOG = "ReverseLog"


_Scale = Annotated[Scale, Field(strict=False)]  # the text in the document stands for it
_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def _check_declared(value: object) -> object:
    if value is None:
        raise InvalidInputError("None is not true or false; leave it out")
    return value


# What may be left out, but not be null.
Declared: TypeAlias = Annotated[bool | None, BeforeValidator(_check_declared)]


class DimensionOptions(DocumentValue, is_extras=True):
    """Options of a dimension. structural: whether the value determines the layout of the model's or
    the optimizer's state, so that it cannot change for a member that keeps its state. None: the
    strategy finds out."""

    structural: Declared = None


class Float(DocumentValue, tag="dim_type"):
    """A dimension whose value is a number in [low, high]."""

    name: NonEmptyText
    low: float
    high: float
    scale: _Scale
    default: float | None = None
    options: DimensionOptions = DimensionOptions()

    @rule
    def _bounds(self) -> Iterator[Violation]:
        yield from _wrong_bounds(self.low, self.high, self.scale)

    @rule
    def _default(self) -> Iterator[Violation]:
        is_ordered = self.low < self.high
        if self.default is not None and is_ordered and not self.low <= self.default <= self.high:
            yield Violation("default", f"{self.default} is not between {self.low} and {self.high}")


class Int(DocumentValue, tag="dim_type"):
    """A dimension whose value is a whole number in [low, high]."""

    name: NonEmptyText
    low: _Int64
    high: _Int64
    scale: _Scale
    options: DimensionOptions = DimensionOptions()

    @rule
    def _bounds(self) -> Iterator[Violation]:
        yield from _wrong_bounds(self.low, self.high, self.scale)


class Categorical(DocumentValue, tag="dim_type"):
    """A dimension whose value is one of several choices without an order."""

    name: NonEmptyText
    choices: NonEmptyItems[FrozenJSON]
    options: DimensionOptions = DimensionOptions()


class Ordinal(DocumentValue, tag="dim_type"):
    """A dimension whose value is one of several choices in order, so that each has neighbours. The
    form of the Rust programs does not have it."""

    name: NonEmptyText
    choices: NonEmptyItems[FrozenJSON]
    options: DimensionOptions = DimensionOptions()


class Conditional(DocumentValue, tag="dim_type"):
    """A dimension that exists only while its parent has one of the given values."""

    name: NonEmptyText
    parent: NonEmptyText
    parent_values: NonEmptyItems[FrozenJSON]
    dimension: "DimensionField"
    options: NoOptions = field(default=NoOptions(), repr=False)


Plain: TypeAlias = Float | Int | Categorical | Ordinal
Dimension: TypeAlias = Plain | Conditional
DimensionField: TypeAlias = Annotated[Dimension, Field(discriminator="dim_type")]
rebuild_dataclass(Conditional)  # type: ignore[arg-type]  # it names what stands after it


def plain(dimension: Dimension) -> Plain:
    """Return the dimension inside any number of nested `Conditional`s."""
    while isinstance(dimension, Conditional):
        dimension = dimension.dimension
    return dimension


class SearchSpace(DocumentValue):
    """The dimensions that are searched, and hyperparameters that are frozen to a value.

    The order of the dimensions has no meaning: equal spaces may differ in it.
    """

    dimensions: Items[DimensionField]
    frozen: Kwargs

    @rule
    def _names(self) -> Iterator[Violation]:
        seen = set(self.frozen)
        names = {dimension.name for dimension in self.dimensions}
        for i, dimension in enumerate(self.dimensions):
            if dimension.name in seen:
                text = f"{dimension.name!r} is taken already"
                yield Violation(f"dimensions[{i}].name", text)
            seen.add(dimension.name)
            others = names - {dimension.name}
            if isinstance(dimension, Conditional) and dimension.parent not in others:
                text = not_one_of(dimension.parent, sorted(others))
                yield Violation(f"dimensions[{i}].parent", text)

    def in_order(self) -> "SearchSpace":
        """Return the same space with its dimensions sorted by name."""
        return replace(self, dimensions=tuple(sorted(self.dimensions, key=attrgetter("name"))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SearchSpace) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.in_order().dimensions, self.frozen


def _wrong_bounds(low: float, high: float, scale: Scale) -> Iterator[Violation]:
    if not low < high:
        yield Violation("low", f"{low} is not below high, {high}")
    elif scale is Scale.LOG and low <= 0:
        yield Violation("low", f"{low} is not allowed on a Log scale; must be > 0")


# ---- Section ----
#
# A job file writes the search space as job fields by dotted path, each with its range:
#
#     search_space:
#       optimizer.lr: {low: 1.0e-4, high: 1.0, scale: log}
#       optimizer.name: {choices: [sgd, adam]}
#       optimizer.momentum: {low: 0.0, high: 0.99, when: {optimizer.name: [sgd]}}
#       batch_size: {choices: [16, 32, 64], ordered: true}
#       model.kwargs.depth: {low: 1, high: 4}      # whole bounds: a whole number
#       model.kwargs.norm: {choices: [a, b], structural: true}
#
# The form of the Rust programs (an object with `dimensions`) is read as well, and is the
# canonical one.

_SCALES: Final = {
    "linear": Scale.LINEAR,
    "log": Scale.LOG,
    "reverse_log": Scale.REVERSE_LOG,
}


class _Range(Section):
    """The short form of a numeric dimension: a number from low to high, a whole number if both
    bounds are."""

    low: Any
    high: Any
    scale: Literal["linear", "log", "reverse_log"] = "linear"
    structural: Declared = None
    when: Any = None

    def dimension(self, name: str) -> Dimension:
        kind = Int if type(self.low) is int and type(self.high) is int else Float
        options = _options(self.structural)
        return kind(name, self.low, self.high, _SCALES[self.scale], options=options)


class _Choices(Section):
    """The short form of a dimension with choices; ordered choices have neighbours."""

    choices: Any
    ordered: bool = False
    structural: Declared = None
    when: Any = None

    def dimension(self, name: str) -> Dimension:
        kind = Ordinal if self.ordered else Categorical
        return kind(name, self.choices, _options(self.structural))


def _options(structural: bool | None) -> DimensionOptions:
    return DimensionOptions() if structural is None else DimensionOptions(structural)


def read_short_form(entries: Mapping[str, object]) -> SearchSpace:
    """Parse the short form of a search space: a mapping from the path of a field to its range."""
    violations: list[Violation] = []
    dimensions: list[Dimension] = []
    for name, written in entries.items():
        try:
            dimensions.append(_dimension(str(name), written))
        except InvalidInputError as error:
            violations += under(str(name), error.violations)
    refuse(violations)
    try:
        return SearchSpace(tuple(dimensions), {}).in_order()
    except InvalidInputError as error:
        raise InvalidInputError(
            violations=[
                Violation(_as_written(violation.field, dimensions), violation.message)
                for violation in error.violations
            ]
        ) from None


def _as_written(field: str, dimensions: list[Dimension]) -> str:
    """Translate an error's path in the canonical search space to the path in its short form."""
    return re.sub(r"dimensions\[(\d+)\]", lambda place: dimensions[int(place[1])].name, field)


def _dimension(name: str, written: object) -> Dimension:
    if isinstance(written, Mapping) and "choices" not in written:
        for key in ("low", "high"):
            if key not in written and not written.keys() - _Range.model_fields:
                raise InvalidInputError.at(key, "missing; or give choices")
    has_choices = isinstance(written, Mapping) and "choices" in written
    given = (_Choices if has_choices else _Range).parse(written)
    dimension = given.dimension(name)
    if "when" not in given.model_fields_set:
        return dimension
    if not isinstance(given.when, Mapping):
        raise InvalidInputError.at("when", f"{given.when!r} is not a mapping")
    if len(given.when) != 1:
        text = f"names {len(given.when)} fields; must name one, with the values it needs"
        raise InvalidInputError.at("when", text)
    ((parent, values),) = given.when.items()
    return Conditional(
        name, str(parent), tuple(values) if isinstance(values, list) else (values,), dimension
    )


SearchSpaceField: TypeAlias = Annotated[
    SearchSpace,
    BeforeValidator(
        lambda value: (
            read_short_form(value)
            if isinstance(value, Mapping) and "dimensions" not in value
            else value
        )
    ),
    WrapSerializer(lambda space, write: write(space.in_order())),
]

"""The search space of a population: which hyperparameters there are and what they may be.

Owns the values, their validity and the JSON form shared with the Rust programs. Draws nothing:
sampling is for the strategy that explores.
"""

from collections.abc import Iterator
from dataclasses import field, replace
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import rebuild_dataclass

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.document import DocumentValue, NoOptions
from stratagem.common.schema.field_types import (
    FrozenJSON,
    Items,
    Kwargs,
    NonEmptyItems,
    NonEmptyText,
)
from stratagem.common.schema.json_text import not_one_of
from stratagem.common.schema.rules import rule


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
    """structural: whether the value decides the layout of a model's state or its optimizer, so that
    it cannot be changed where a state is kept. None: that is for the strategy to find out."""

    structural: Declared = None


class Float(DocumentValue, tag="dim_type"):
    """A number in [low, high]."""

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
    """A whole number in [low, high]."""

    name: NonEmptyText
    low: _Int64
    high: _Int64
    scale: _Scale
    options: DimensionOptions = DimensionOptions()

    @rule
    def _bounds(self) -> Iterator[Violation]:
        yield from _wrong_bounds(self.low, self.high, self.scale)


class Categorical(DocumentValue, tag="dim_type"):
    """One of the choices."""

    name: NonEmptyText
    choices: NonEmptyItems[FrozenJSON]
    options: DimensionOptions = DimensionOptions()


class Ordinal(DocumentValue, tag="dim_type"):
    """One of the choices, which stand in order: each has neighbours. Ours; not in the Rust form."""

    name: NonEmptyText
    choices: NonEmptyItems[FrozenJSON]
    options: DimensionOptions = DimensionOptions()


class Conditional(DocumentValue, tag="dim_type"):
    """A dimension that is there only while the parent has one of these values."""

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
    """Return the dimension itself, without the conditions that it stands under."""
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
        """Return the same space with its dimensions in order of name."""
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

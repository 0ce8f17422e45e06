"""The search space as a job file writes it: job fields by dotted path, each with its range.

    search_space:
      optimizer.lr: {low: 1.0e-4, high: 1.0, scale: log}
      optimizer.name: {choices: [sgd, adam]}
      optimizer.momentum: {low: 0.0, high: 0.99, when: {optimizer.name: [sgd]}}
      batch_size: {choices: [16, 32, 64], ordered: true}
      model.kwargs.depth: {low: 1, high: 4}      # whole bounds: a whole number
      model.kwargs.norm: {choices: [a, b], structural: true}

The form of the Rust programs (an object with `dimensions`) is read as well, and is the canonical
one. Knows no strategy.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, WrapSerializer

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.document import Section, refuse
from stratagem.common.schema.json_text import under
from stratagem.common.strategy.search_space import (
    Categorical,
    Conditional,
    Declared,
    Dimension,
    DimensionOptions,
    Float,
    Int,
    Ordinal,
    Scale,
    SearchSpace,
)

_SCALES: Final = {
    "linear": Scale.LINEAR,
    "log": Scale.LOG,
    "reverse_log": Scale.REVERSE_LOG,
}


class _Range(Section):
    """A number between two; whole bounds: a whole number."""

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
    """One of several values; ordered ones have neighbours."""

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
    """The search space of a mapping from a field's path to its range."""
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
    """The place in the short form of what is wrong at a place of the canonical one."""
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

"""The values that stand beside strategies in the shared JSON: a `Value` and a `Distribution`.

A Value is {"type": <kind>, "data": <content>}; a Distribution is "Local", "Any" or
{"Remote": <target>}. Nothing in the product carries them: they are written down here, made of what
strategies are made of, so that a change to that which the other programs could not read is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainSerializer

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.document import DocumentValue, Section
from stratagem.common.schema.field_types import MAX_UNSIGNED, FrozenJSON, Items, OneKey
from stratagem.common.schema.rules import rule
from stratagem.common.strategy import RemoteTarget
from stratagem.common.strategy.choices import TARGET


def _read_bytes(value: object) -> object:
    if not isinstance(value, list):
        return value
    if not all(type(number) is int and 0 <= number < 256 for number in value):
        raise InvalidInputError("holds a number that is no byte, 0 to 255")
    return bytes(value)


class Numbers(DocumentValue):
    """Numbers in row-major order with their shape."""

    values: Items[float]
    shape: Items[Annotated[int, Field(ge=0, le=MAX_UNSIGNED)]]

    @rule
    def _shape_fits(self) -> Iterator[Violation]:
        if math.prod(self.shape) != len(self.values):
            text = f"{list(self.shape)} does not hold {len(self.values)} values"
            yield Violation("shape", text)


class Tensor(DocumentValue, tag="type"):
    """A tensor."""

    data: Numbers


class Text(DocumentValue, tag="type"):
    """A text."""

    data: str


class Json(DocumentValue, tag="type"):
    """Any JSON value."""

    data: FrozenJSON


class Bytes(DocumentValue, tag="type"):
    """Bytes, written as a list of numbers."""

    data: Annotated[bytes, BeforeValidator(_read_bytes), PlainSerializer(list)]


class Object(DocumentValue, tag="type"):
    """A list of JSON values that belong to an object of the caller's."""

    data: Items[FrozenJSON]


class Empty(DocumentValue, tag="type"):
    """No value."""


Value: TypeAlias = Tensor | Text | Json | Bytes | Object | Empty


class Remote(DocumentValue):
    """A distribution over the workers that the target names."""

    target: Annotated[RemoteTarget, TARGET]


Distribution: TypeAlias = Literal["Local", "Any"] | Remote


class ValueDocument(Section):
    """What holds a value, so that errors name it."""

    value: Annotated[Value, Field(discriminator="type")]


class DistributionDocument(Section):
    """What holds a distribution, so that errors name it."""

    distribution: Annotated[Distribution, OneKey({"Remote": Remote}, words=("Local", "Any"))]

"""Parses intervals at which something happens: "1 epoch", "100 steps", "2 rounds", "1 generation".

Owns the spelling. Which unit has a meaning under which strategy is for the job to check.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self, TypeAlias, cast

from pydantic import PlainSerializer, PlainValidator

from stratagem.common.base.errors import InvalidInputError

Unit: TypeAlias = Literal["epoch", "step", "round", "generation"]

_SPELLING: Final = re.compile(r"([1-9][0-9]{0,17}) (epoch|step|round|generation)s?")


@dataclass(frozen=True, slots=True)
class Every:
    """Each time that `count` units have passed."""

    count: int
    unit: Unit

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read the spelling that `str()` writes; singular and plural are equal."""
        matched = _SPELLING.fullmatch(text) if isinstance(text, str) else None
        if matched is None:
            raise InvalidInputError(f"{text!r} is not like 1 epoch, 100 steps or 2 rounds")
        return cls(int(matched[1]), cast(Unit, matched[2]))

    def __str__(self) -> str:
        return f"{self.count} {self.unit}{'' if self.count == 1 else 's'}"


EveryField: TypeAlias = Annotated[
    Every,
    PlainValidator(lambda value: value if isinstance(value, Every) else Every.parse(value)),
    PlainSerializer(str),
]

"""Ditto: a model of each client's own beside the global one: the section `options.ditto` of
Federated."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Self

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema.document import DocumentValue
from stratagem.common.schema.field_types import Positive
from stratagem.common.schema.json_text import JSON

KEY: Final = "lambda"
"""As documents have it; Python has the word already."""


class Ditto(DocumentValue, is_extras=True):
    """Each client also trains a model of its own, whose distance to the global one costs
    (lambda / 2)·‖v − w‖² (Li et al., 2021, https://arxiv.org/abs/2012.04221)."""

    lambda_: Positive

    @classmethod
    def _read(cls, value: object, read: Callable[[object], Self]) -> Self:
        if isinstance(value, Mapping):
            if value.keys() != {KEY}:
                text = f"must be {{{KEY}: a number > 0}}; is {dict(value)!r}"
                raise InvalidInputError(text)
            value = {f"{KEY}_": value[KEY]}
        try:
            return super()._read(value, read)
        except InvalidInputError as error:
            told = [replace(each, field=each.field.removesuffix("_")) for each in error.violations]
            raise InvalidInputError(violations=told) from None

    @classmethod
    def _write(cls, made: Any, write: Callable[[Any], dict[str, JSON]]) -> dict[str, JSON]:
        return {
            name.removesuffix("_"): plain for name, plain in super()._write(made, write).items()
        }

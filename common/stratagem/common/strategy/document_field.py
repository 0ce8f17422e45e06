"""The field of a document section that holds a training strategy.

Reads the JSON form of a strategy, or takes a strategy as it is, and reports what is wrong with it
as one `InvalidInputError`. Used by the job and by the subgraphs of a model.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, get_args

from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.strategy import Strategy, parse_strategy


def _read_strategy(value: object) -> Strategy:
    if isinstance(value, get_args(Strategy)):
        strategy: Strategy = value
        return strategy
    if isinstance(value, str):
        raise InvalidInputError(f"{value!r} is not a mapping such as {{type: Local}}")
    return parse_strategy(value, "")


StrategyField: TypeAlias = Annotated[
    Strategy,
    GetPydanticSchema(
        lambda _source, _handler: core_schema.no_info_plain_validator_function(_read_strategy)
    ),
]

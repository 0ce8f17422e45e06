"""Built-in strategies of which one raises."""

from dataclasses import replace
from typing import Any, NoReturn

from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.strategy_contract import Strategies, Strategy
from stratagem.coordinator.strategies.synchronous.local import STRATEGY as local


def raising(function: str) -> Strategies:
    """The built-in strategies, but with a Local one of whose functions raises."""
    broken: dict[str, Any] = {function: _raise}
    return with_local(replace(local, **broken))


def with_local(strategy: Strategy) -> Strategies:
    """The built-in strategies, but for this one in the place of Local."""
    return Strategies({**BUILT_IN.built_in, "Local": strategy})


def _raise(*_: object) -> NoReturn:
    raise ZeroDivisionError("by zero")

"""Settings that contradict each other, and how wrong settings are told to an operator.

Both processes refuse at their start what would only show hours later. Knows no setting.
"""

from typing import Any, Final

from pydantic import ValidationError

from stratagem.common.base.errors import InvalidInputError

HEARTBEATS_PER_TTL: Final = 2.4
"""A worker whose lease runs out after fewer is lost with the first heartbeat that is late."""


def at_least(settings: Any, large: str, small: str, times: float, why: str) -> None:
    """Raise ValueError unless one setting is so many times another one; the message names both."""
    value, other = getattr(settings, large), getattr(settings, small)
    if value < times * other:
        factor = "" if times == 1 else f"{times:g} times "
        raise ValueError(
            f"{flag(large)} is {value:g} and must be at least {factor}{flag(small)}, which is "
            f"{other:g}: {why}"
        )


def flag(name: str) -> str:
    """A setting as it stands on the command line."""
    return f"--{name.replace('_', '-')}"


def told(program: str, error: ValidationError) -> str:
    """Describe what is wrong with the settings of a program, one line for each error."""
    lines = []
    for detail in error.errors():
        where = ".".join(map(str, detail["loc"]))
        cause = detail.get("ctx", {}).get("error")
        text = detail["msg"].removeprefix("Value error, ")
        if isinstance(cause, InvalidInputError) and cause.violations:
            text = "; ".join(each.message for each in cause.violations)  # the flag is their field
        lines.append(f"{program}: {flag(where)}: {text}" if where else f"{program}: {text}")
    return "\n".join(lines)

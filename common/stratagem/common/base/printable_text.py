"""Text of others as people may see it: nothing in it moves a cursor, hides or turns around what
stands next to it.

One function for all: the coordinator's entrance, where it comes from workers and clients; errors
that another process has sent; and the command line, before a terminal. Owns which characters these
are. Imports nothing, as the command line has to start soon.
"""

import re
from typing import Final

_NEWLINES: Final = "\n\t"
_MOVING: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_MOVING_OR_NEWLINE: Final = re.compile(rf"{_MOVING.pattern}|[{_NEWLINES}]")


def printable(text: str, *, is_line: bool = False) -> str:
    """Return the text with `\\x1b` written out where an escape character was, and so on; newlines
    and tabs stay, unless it is to be one line. Colours are left out."""
    pattern = _MOVING_OR_NEWLINE if is_line else _MOVING
    if pattern.search(text) is None:
        return text
    return pattern.sub(
        lambda match_: f"\\x{ord(match_[0]):02x}", _COLOUR.sub("", text).replace("\r\n", "\n")
    )


def is_printable(text: str) -> bool:
    """Return whether the text is one line, all of which may be shown."""
    return _MOVING_OR_NEWLINE.search(text) is None

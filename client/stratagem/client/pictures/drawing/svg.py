"""Writes SVG elements: escaped text, fixed decimals, colours by name."""

import html
import re
from collections.abc import Iterable
from typing import Any, Final

from stratagem.client.pictures.drawing.colours import LIGHT

CHARACTER_WIDTH: Final = 6.9
"""Of the mean character, in pixels at the size of ordinary text: what labels are placed by."""
SMALL: Final = 10

_NOT_SHOWN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "\ufffe\uffff]"
)
"""Characters that XML refuses, and those that turn the direction of what follows them."""


def escaped(text: object) -> str:
    """Return text for between tags and within attributes, without control characters."""
    return html.escape(_NOT_SHOWN.sub("", str(text)), quote=True)


def decimal(value: float) -> str:
    """Return a coordinate with one decimal at most: "12", "12.5"."""
    text = f"{value:.1f}"
    return "0" if text in ("0.0", "-0.0") else text.removesuffix(".0")


def element(name: str, *content: str, **attributes: str | float | None) -> str:
    """Return an element. Content is SVG, attributes are plain text or numbers.

    fill and stroke name a colour, or are "none"; underscores of names become hyphens.
    """
    classes: list[str] = []
    written: list[str] = []
    for key, value in attributes.items():
        if value is None:
            continue
        shown = decimal(value) if isinstance(value, int | float) else value
        if key in ("fill", "stroke") and shown in LIGHT:
            classes.append(f"sg-{key[0]}-{shown}")
            shown = LIGHT[shown]
        written.append(f' {key.replace("_", "-")}="{escaped(shown)}"')
    by_class = f' class="{" ".join(classes)}"' if classes else ""
    head = f"<{name}{by_class}{''.join(written)}"
    return f"{head}>{''.join(content)}</{name}>" if content else f"{head}/>"


def label(  # noqa: PLR0913  (the attributes of a text)
    x: float,
    y: float,
    text: object,
    *,
    fill: str = "ink",
    anchor: str | None = None,
    size: float | None = None,
    weight: str | None = None,
    has_halo: bool = False,
) -> str:
    """Return one line of text; anchor: start, middle or end. has_halo: it stands on lines."""
    halo: dict[str, Any] = {"stroke": "surface", "stroke_width": 3.5, "paint_order": "stroke"}
    shape: dict[str, Any] = {"text_anchor": anchor, "font_size": size, "font_weight": weight}
    return element(
        "text", escaped(text), x=x, y=y, fill=fill, **shape, **(halo if has_halo else {})
    )


def hint(text: str) -> str:
    """Return what is shown when the pointer rests on the element that this stands in."""
    return f"<title>{escaped(text)}</title>"


def path_of(points: Iterable[tuple[float, float]]) -> str:
    """Return the data of a path through the points."""
    return "".join(
        f"{'L' if at else 'M'}{decimal(x)} {decimal(y)}" for at, (x, y) in enumerate(points)
    )


def width_of(text: object, size: float = 12) -> float:
    """Return about how wide a text is, in pixels."""
    return len(str(text)) * CHARACTER_WIDTH * size / 12


def shortened(text: str, width: float, size: float = 12) -> str:
    """Return the text, or as much of it as has room, with an ellipsis."""
    room = int(width / (CHARACTER_WIDTH * size / 12))
    return text if len(text) <= room else f"{text[: max(room - 1, 1)]}…"

"""Write SVG elements with escaped text, fixed decimals and named colours; define pictures."""

import base64
import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

# ---- Elements ----

CHARACTER_WIDTH: Final = 6.9
"""The mean width of a character in pixels at the default font size, to estimate text widths."""
SMALL: Final = 10

_NOT_SHOWN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "\ufffe\uffff]"
)
"""The characters that XML refuses, and those that change the writing direction."""


def escaped(text: object) -> str:
    """Escape text for element content and attributes; control characters are removed."""
    return html.escape(_NOT_SHOWN.sub("", str(text)), quote=True)


def decimal(value: float) -> str:
    """Format a coordinate with at most one decimal: "12", "12.5"."""
    text = f"{value:.1f}"
    return "0" if text in ("0.0", "-0.0") else text.removesuffix(".0")


def element(name: str, *content: str, **attributes: str | float | None) -> str:
    """Return an SVG element. Content is SVG, attributes are plain text or numbers. `fill` and
    `stroke` name a colour, or are "none"; underscores in attribute names become hyphens."""
    classes: list[str] = []
    written: list[str] = []
    for key, value in attributes.items():
        if value is None:
            continue
        text = decimal(value) if isinstance(value, int | float) else value
        if key in ("fill", "stroke") and text in LIGHT:
            classes.append(f"sg-{key[0]}-{text}")
            text = LIGHT[text]
        written.append(f' {key.replace("_", "-")}="{escaped(text)}"')
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
    """Return a text element of one line; anchor: start, middle or end. has_halo: outline the text,
    so that it is readable on top of lines."""
    halo: dict[str, Any] = {"stroke": "surface", "stroke_width": 3.5, "paint_order": "stroke"}
    shape: dict[str, Any] = {"text_anchor": anchor, "font_size": size, "font_weight": weight}
    return element(
        "text", escaped(text), x=x, y=y, fill=fill, **shape, **(halo if has_halo else {})
    )


def hint(text: str) -> str:
    """Return a tooltip (title element) for the enclosing element."""
    return f"<title>{escaped(text)}</title>"


def path_of(points: Iterable[tuple[float, float]]) -> str:
    """Return the SVG path data of a line through the points."""
    return "".join(
        f"{'L' if at else 'M'}{decimal(x)} {decimal(y)}" for at, (x, y) in enumerate(points)
    )


def width_of(text: object, size: float = 12) -> float:
    """Estimate the width of a text, in pixels."""
    return len(str(text)) * CHARACTER_WIDTH * size / 12


def shortened(text: str, width: float, size: float = 12) -> str:
    """Return the text, cut with an ellipsis to fit the width in pixels."""
    room = int(width / (CHARACTER_WIDTH * size / 12))
    return text if len(text) <= room else f"{text[: max(room - 1, 1)]}…"


# ---- Colours ----
#
# Colours have names by their meaning, for light and for dark backgrounds. The eight colours of
# series differ in lightness, too, for people with a colour deficiency.

LIGHT: Final[Mapping[str, str]] = {
    "ink": "#1f2933",
    "muted": "#66717f",
    "grid": "#e3e7ec",
    "surface": "#ffffff",
    "s1": "#2f6db5",
    "s2": "#d17a1f",
    "s3": "#2f8a5b",
    "s4": "#8158a8",
    "s5": "#c04843",
    "s6": "#23828f",
    "s7": "#86694b",
    "s8": "#b85a92",
    "good": "#2f8a5b",
    "warn": "#b3740f",
    "bad": "#c04843",
}
DARK: Final[Mapping[str, str]] = {
    "ink": "#e4e8ec",
    "muted": "#9aa5b1",
    "grid": "#2d353e",
    "surface": "#14181d",
    "s1": "#77a9e8",
    "s2": "#efa653",
    "s3": "#67c08f",
    "s4": "#b796dc",
    "s5": "#e98680",
    "s6": "#62c1ce",
    "s7": "#c5a788",
    "s8": "#e298c4",
    "good": "#67c08f",
    "warn": "#e3b15a",
    "bad": "#e98680",
}
NUM_SERIES: Final = 8


def series_colour(index: int) -> str:
    """Return the name of the colour for a series index; colours repeat after eight."""
    return f"s{index % NUM_SERIES + 1}"


def stylesheet() -> str:
    """Return the CSS for all pictures; a page includes it once."""
    names = "".join(
        f".sg-f-{name}{{fill:var(--sg-{name})}}.sg-s-{name}{{stroke:var(--sg-{name})}}"
        for name in LIGHT
    )
    dark = f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    return (
        f":root{{{_variables(LIGHT)}}}{dark}@media print{{:root{{{_variables(LIGHT)}}}}}"
        f".sg{{max-width:100%;height:auto}}{names}"
    )


def _variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--sg-{name}:{colour};" for name, colour in colours.items())


# ---- Clipping ----
#
# Lines are cut at the frame that they are drawn in.

Point = tuple[float, float]


def within(points: Iterable[Point], top: float, bottom: float) -> Iterator[list[Point]]:
    """Clip a line to the heights from top to bottom (top < bottom); yield its visible parts."""
    part: list[Point] = []
    for before, after in pairwise(points):
        enters, leaves = _inside(before[1], after[1], top, bottom)
        if enters > leaves:
            continue
        if not part or enters > 0:
            part = [_between(before, after, enters)]
        part.append(_between(before, after, leaves))
        if leaves < 1:
            yield part
            part = []
    if part:
        yield part


def _inside(start: float, end: float, top: float, bottom: float) -> tuple[float, float]:
    """Return the part of a line segment that is visible, as two shares of its length; the first is
    greater than the second if none is. start, end: the heights of the segment's ends."""
    if start == end:
        return (0.0, 1.0) if top <= start <= bottom else (1.0, 0.0)
    first, last = sorted(((top - start) / (end - start), (bottom - start) / (end - start)))
    return max(first, 0.0), min(last, 1.0)


def _between(before: Point, after: Point, share: float) -> Point:
    (x, y), (to_x, to_y) = before, after
    return x + (to_x - x) * share, y + (to_y - y) * share


# ---- Order of names ----
#
# Numbers inside names count as numbers when names are listed.

_NUMBER: Final = re.compile(r"(\d{1,18})")


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return a sort key that orders numbers in names by value: worker-2 before worker-10."""
    parts = _NUMBER.split(name)
    return tuple(
        (parts[at], int(parts[at + 1]) if at + 1 < len(parts) else -1)
        for at in range(0, len(parts), 2)
    )


# ---- Pictures ----
#
# A picture has SVG text, a description in words, and a table of the same numbers.

FONT: Final = "system-ui, -apple-system, Segoe UI, sans-serif"


@dataclass(frozen=True, slots=True)
class NumberTable:
    """A table of texts with column headings."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_html(self) -> str:
        """Return the table as HTML; its first column holds row headings."""
        head = "".join(f'<th scope="col">{escaped(heading)}</th>' for heading in self.headings)
        rows = "".join(
            f'<tr><th scope="row">{escaped(row[0])}</th>'
            + "".join(f"<td>{escaped(cell)}</td>" for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished SVG picture with a description and a table of its numbers; sizes in pixels."""

    title: str
    description: str
    """A text alternative to the picture, of one or two sentences."""
    width: int
    height: int
    content: str
    """The SVG elements inside the outermost svg element."""
    table: NumberTable
    steps: tuple[float, float, float, float] | None = None
    """The first and last step of a curve, and the horizontal positions of both in pixels."""

    @property
    def svg(self) -> str:
        """Return the SVG for a page that includes `stylesheet()`."""
        return self._whole("")

    @property
    def svg_file(self) -> str:
        """Return the SVG as a standalone file, with light and dark colours and a background."""
        surface = element(
            "rect", width=self.width, height=self.height, rx=6, fill="surface", stroke="none"
        )
        return self._whole(f"<style>{stylesheet()}</style>{surface}")

    def to_html(self) -> str:
        """Return the picture as an img element with embedded data, so that it is shown without
        scripts, even in a page that is not trusted."""
        data = base64.b64encode(self.svg_file.encode()).decode()
        words = escaped(f"{self.title}: {self.description}")
        return f'<img alt="{words}" src="data:image/svg+xml;base64,{data}">'

    def _whole(self, before: str) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="sg" role="img" {size} '
            f'viewBox="0 0 {decimal(self.width)} {decimal(self.height)}" '
            f'font-family="{FONT}" font-size="12">'
            f"<title>{escaped(self.title)}</title><desc>{escaped(self.description)}</desc>"
            f"{before}{self.content}</svg>"
        )


def thinned(rows: Sequence[tuple[str, ...]], limit: int = 60) -> tuple[tuple[str, ...], ...]:
    """Return at most `limit` rows, evenly sampled, the first and the last one included."""
    if len(rows) <= limit:
        return tuple(rows)
    places = sorted({round(at * (len(rows) - 1) / (limit - 1)) for at in range(limit)})
    return tuple(rows[place] for place in places)

"""A picture: its SVG text, what it says in words, and a table of the same numbers."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stratagem.client.pictures.drawing.colours import stylesheet
from stratagem.client.pictures.drawing.svg import decimal, element, escaped

FONT: Final = "system-ui, -apple-system, Segoe UI, sans-serif"


@dataclass(frozen=True, slots=True)
class NumberTable:
    """Rows of text under headings."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_html(self) -> str:
        """Return the table as HTML, its first column as the headings of its rows."""
        head = "".join(f'<th scope="col">{escaped(each)}</th>' for each in self.headings)
        rows = "".join(
            f'<tr><th scope="row">{escaped(row[0])}</th>'
            + "".join(f"<td>{escaped(cell)}</td>" for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn, in pixels of the size that it was drawn for."""

    title: str
    description: str
    """What it says, in a sentence or two."""
    width: int
    height: int
    content: str
    """SVG elements."""
    table: NumberTable
    steps: tuple[float, float, float, float] | None = None
    """Of a curve: its first and its last step, and where these are to the right, in pixels."""

    @property
    def svg(self) -> str:
        """Return the picture for a page that has the stylesheet of pictures."""
        return self._whole("")

    @property
    def svg_file(self) -> str:
        """Return the picture for a file of its own: with its colours, light and dark, and the
        surface that it stands on."""
        surface = element(
            "rect", width=self.width, height=self.height, rx=6, fill="surface", stroke="none"
        )
        return self._whole(f"<style>{stylesheet()}</style>{surface}")

    def to_html(self) -> str:
        """Return the picture as an image that has its bytes in it: shown without scripts, also
        where nobody trusts the page."""
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
    """Return at most so many rows, evenly, with the first and the last one."""
    if len(rows) <= limit:
        return tuple(rows)
    places = sorted({round(at * (len(rows) - 1) / (limit - 1)) for at in range(limit)})
    return tuple(rows[place] for place in places)

"""Sequence diagrams of the documentation, drawn in the colours of the product's own pictures.

A diagram is its participants and its steps, from above to below. `docs/generate.py` writes each to
docs/images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stratagem.client.pictures.svg import NumberTable, Picture, element, label, path_of, width_of

WIDTH: Final = 760
HEAD: Final = 44
ROW: Final = 32
SIZE: Final = 11
SIDE: Final = 12


@dataclass(frozen=True)
class Call:
    """A message from one participant to another; is_answer: dashed, it answers a call."""

    source: str
    target: str
    text: str
    is_answer: bool = False


@dataclass(frozen=True)
class Note:
    """Actions of single participants."""

    first: str
    last: str
    text: str


@dataclass(frozen=True)
class Opened:
    """Begins a frame around what follows: a loop, or things that happen at the same time."""

    text: str


@dataclass(frozen=True)
class Divided:
    """Ends one part of a frame and begins the next, which happens at the same time."""


@dataclass(frozen=True)
class Closed:
    """Ends a frame."""


Step = Call | Note | Opened | Divided | Closed


def sequence(title: str, names: Sequence[str], steps: Sequence[Step]) -> Picture:
    """Return the participants side by side, each with a line of time, and the steps between."""
    apart = WIDTH / len(names)
    places = {name: apart * (at + 0.5) for at, name in enumerate(names)}
    height = HEAD + ROW * len(steps) + 14
    parts = [_head(name, x, apart, height) for name, x in places.items()]
    opened: list[float] = []
    for at, step in enumerate(steps):
        y = HEAD + ROW * (at + 0.5) + 6
        match step:
            case Opened():
                opened.append(y - 8)
                parts.append(label(SIDE + 5, y + 6, step.text, fill="s4", size=SIZE, weight="600"))
            case Divided():
                parts.append(_rule(y))
            case Closed():
                parts.append(_frame(opened.pop(), y - 6))
            case Call():
                parts.append(_call(step, places[step.source], places[step.target], y))
            case Note():
                parts.append(_note(step, places[step.first], places[step.last], y))
    words = "; ".join(
        f"{step.source} to {step.target}: {step.text}" for step in steps if isinstance(step, Call)
    )
    return Picture(title, words, WIDTH, height, "".join(parts), NumberTable((), ()))


def _head(name: str, x: float, apart: float, height: int) -> str:
    wide = min(apart - 14, 130)
    box = element("rect", x=x - wide / 2, y=6, width=wide, height=26, rx=5, fill="grid")
    line = element("line", x1=x, x2=x, y1=32, y2=height - 8, stroke="muted", stroke_dasharray="2 4")
    return line + box + label(x, 23, name, anchor="middle", weight="600")


def _rule(y: float) -> str:
    return element(
        "line", x1=SIDE, x2=WIDTH - SIDE, y1=y, y2=y, stroke="s4", stroke_dasharray="6 4"
    )


def _frame(top: float, bottom: float) -> str:
    shape = {"x": SIDE, "y": top, "width": WIDTH - 2 * SIDE, "height": bottom - top, "rx": 5}
    return element("rect", **shape, fill="none", stroke="s4")


def _call(step: Call, x1: float, x2: float, y: float) -> str:
    way = 1 if x2 > x1 else -1
    tip = x2 - 2 * way
    dashes = "5 4" if step.is_answer else None
    line = element(
        "line", x1=x1, x2=tip, y1=y, y2=y, stroke="s1", stroke_width="1.4", stroke_dasharray=dashes
    )
    corners = [(tip, y), (tip - 8 * way, y - 4), (tip - 8 * way, y + 4)]
    head = element("path", d=path_of(corners) + "Z", fill="s1")
    return line + head + _text((x1 + x2) / 2, y - 5, step.text)


def _note(step: Note, x1: float, x2: float, y: float) -> str:
    wide = max(width_of(step.text, SIZE) + 14, abs(x2 - x1) + 60)
    x = min(max((x1 + x2) / 2, wide / 2 + 18), WIDTH - wide / 2 - 18)
    shape = {"x": x - wide / 2, "y": y - 15, "width": wide, "height": 22, "rx": 3}
    box = element("rect", **shape, fill="surface", stroke="s2")
    return box + label(x, y, step.text, anchor="middle", size=SIZE)


def _text(x: float, y: float, text: str) -> str:
    half = width_of(text, SIZE) / 2
    inside = min(max(x, half + 18), WIDTH - half - 18)
    return label(inside, y, text, anchor="middle", size=SIZE, has_halo=True)

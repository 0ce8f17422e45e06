"""The colours of pictures by what they stand for, for light and for dark surroundings.

Eight colours of series that people with a colour deficiency tell apart by their lightness, too.
"""

from collections.abc import Mapping
from typing import Final

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
    """Return the name of the colour of a series; they repeat after eight."""
    return f"s{index % NUM_SERIES + 1}"


def stylesheet() -> str:
    """Return the rules for all classes of pictures, once for a page."""
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

"""The shape of a page: what assistive technology finds in it, without its numbers; and whether all
that is visible has a place of its own. Neither depends on the fonts of a machine."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MASKS = (
    (re.compile(r"\b[0-9a-f]{16}\b"), "DIGEST"),
    (re.compile(r"\b\d{4}-\d\d-\d\d (?=\d\d:\d\d:\d\d)"), ""),
    (re.compile(r"\d[\d,.:]*(?:e[-+]?\d+)?"), "#"),
    (re.compile(r"(?:#(?: s\b)? ?){2,}"), "# "),
    (re.compile(r'(- img "(?:Members|Time line)"): .*'), r"\1"),
)
"""What differs from time to time, such as how many marks an axis of seconds has, and the day of a
run that began before midnight."""
WITHOUT = '- list "Events, the newest first"'
RUN = re.compile(r"""- '?row "compare (\S+) """)
MISPLACED = Path(__file__).with_name("misplaced.js").read_text()


def shape_of(page: Any, runs: frozenset[str], words: Mapping[str, str]) -> str:
    """What a screen reader finds on the page, with numbers masked.

    runs: of the list, those that count. words: what stands for words of this machine.
    """
    text = page.locator("body").aria_snapshot()
    for word, instead in words.items():
        text = text.replace(word, instead)
    return "\n".join(_kept(text.splitlines(), runs)) + "\n"


def _kept(lines: list[str], runs: frozenset[str]) -> Iterator[str]:
    hidden_below = None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if hidden_below is not None and depth > hidden_below:
            continue
        hidden_below = None
        row = RUN.match(line.strip())
        if row and row[1] not in runs:
            hidden_below = depth
            continue
        if line.strip().startswith(WITHOUT):
            hidden_below = depth
        masked = line
        for mask, instead in MASKS:
            masked = mask.sub(instead, masked)
        yield masked


def misplaced(page: Any) -> list[str]:
    """What lies over something else, comes before what it follows, or reaches out of its place."""
    found: list[str] = page.evaluate(MISPLACED)
    return found

"""The pages of the documentation, and the code in them."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.generate import pages
from tests.repository import ROOT

PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUNNABLE = 'title="job.yaml"'
"""Marks a block of YAML as a whole job."""
INLINE_CODE = re.compile(r"`([^`\n]+)`")


@cache
def prose(page: Path) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text())


def blocks(page: Path, language: str, mark: str = "") -> Iterator[str]:
    for found in FENCE.finditer(page.read_text()):
        if found[1] == language and mark in ["", *found[2].split()]:
            yield found[3]

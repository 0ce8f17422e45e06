"""Rewrite the generated parts of the documentation: `python docs/generate.py`.

A page holds a pair of markers, `<!-- generated: NAME -->` and `<!-- end -->`; what stands between
them is made here from the code, and a test fails when it is not current. Owns the markers.
Pictures that are drawn from no run are written too.
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `docs` and `tests`

from docs import (
    architecture_pictures,
    callers,
    code_map,
    error_catalogue,
    nesting,
    processes,
    tables,
    training_phases,
)

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- generated: ([\w -]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


MAKERS: Mapping[str, Callable[[], str]] = {
    **tables.RENDERED,
    **processes.RENDERED,
    **callers.RENDERED,
    **error_catalogue.RENDERED,
    **nesting.RENDERED,
    **code_map.RENDERED,
    "training phases": training_phases.arrow_table,
}
"""The makers of the generated parts, by name."""


@cache
def part(name: str) -> str:
    """Return a generated part; KeyError names an unknown one."""
    return MAKERS[name]()


def images() -> Mapping[Path, str]:
    """Return the text of every picture that is drawn from no run, by its file."""
    folder = ROOT / "docs" / "images"
    return {folder / name: text for name, text in architecture_pictures.pictures().items()}


def pages() -> list[Path]:
    """Return all pages that readers see."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render(text: str) -> str:
    """Return the page with its parts generated again; KeyError names an unknown marker."""
    return MARKED.sub(lambda found: f"{found[1]}{part(found[2])}\n{found[3]}", text)


def main() -> None:
    """Rewrite the pages and pictures that are not current, and name them."""
    for image, drawn in images().items():
        if not image.exists() or image.read_text() != drawn:
            image.write_text(drawn)
            print(image.relative_to(ROOT))
    for page in pages():
        text = page.read_text()
        if render(text) != text:
            page.write_text(render(text))
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()

"""The map of the code: every folder, with the first sentence that its package says."""

import ast
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

from docs.tables import table
from tests.house.source import tree

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("client", "coordinator", "worker", "tools", "common")
GENERATED = "stratagem/v1"
SENTENCE = re.compile(r"(.+?)(?:\. |\.?$)")


@cache
def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop, or ""."""
    said = ast.get_docstring(tree(path)) or ""
    paragraph = " ".join(said.partition("\n\n")[0].split()).removeprefix("This package ")
    found = SENTENCE.match(paragraph[:1].upper() + paragraph[1:])
    return found[1].replace("|", "\\|") if found else ""


@cache
def _folders(part: str) -> dict[str, Path]:
    """Return the folders of a part that hold modules, by name."""
    root = ROOT / part / "stratagem"
    modules = [path for path in root.rglob("*.py") if path.name != "__init__.py"]
    folders = {path.parent for path in modules if GENERATED not in str(path)}
    return {str(folder.relative_to(root)): folder for folder in sorted(folders)}


def map_of(part: str) -> str:
    """Return a table of a part's folders, each with its purpose in one sentence."""
    rows = (
        (
            f"[{name}](../../{folder.relative_to(ROOT)})",
            first_sentence(folder / "__init__.py") if (folder / "__init__.py").exists() else "",
        )
        for name, folder in _folders(part).items()
    )
    return table(("folder", "is for"), rows)


RENDERED: Mapping[str, Callable[[], str]] = {f"map {part}": partial(map_of, part) for part in PARTS}
"""The makers of the parts by the names of their markers."""

"""The map of the code: every module, with the first sentence that it says about itself."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
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
    """Of a module's docstring, on one line, without its full stop; "" where there is none."""
    said = ast.get_docstring(tree(path)) or ""
    paragraph = " ".join(said.partition("\n\n")[0].split())
    found = SENTENCE.match(paragraph)
    return found[1].replace("|", "\\|") if found else ""


def purpose(folder: Path) -> str:
    """The prose of a package's docstring: all paragraphs that are not indented lists."""
    package = folder / "__init__.py"
    if not package.exists():
        return ""
    paragraphs = (ast.get_docstring(tree(package)) or "").split("\n\n")
    return "\n\n".join(each for each in paragraphs if not each.startswith(" "))


def _modules(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py" and (said := first_sentence(path)):
            yield f"[{path.name}](../../{path.relative_to(ROOT)})", said


@cache
def _folders(part: str) -> dict[str, tuple[Path, list[tuple[str, str]]]]:
    """By name, the folders of a part that hold modules, and those modules."""
    root = ROOT / part / "stratagem"
    folders = sorted({path.parent for path in root.rglob("*.py")})
    found = {str(folder.relative_to(root)): (folder, list(_modules(folder))) for folder in folders}
    return {
        name: (folder, rows)
        for name, (folder, rows) in found.items()
        if rows and GENERATED not in str(folder)
    }


def _anchor(name: str) -> str:
    return name.replace("/", "")


def contents_of(part: str) -> str:
    """A table of a part's folders, each with its purpose in one sentence."""
    rows = (
        (
            f"[{name}](#{_anchor(name)})",
            str(len(modules)),
            first_sentence(folder / "__init__.py") if (folder / "__init__.py").exists() else "",
        )
        for name, (folder, modules) in _folders(part).items()
    )
    return table(("folder", "modules", "is for"), rows)


def map_of(part: str) -> str:
    """The folders of a part, then a table of the modules of each, the part's own modules first."""
    made = [contents_of(part)]
    for name, (folder, rows) in _folders(part).items():
        made += [f"### {name}", purpose(folder), table(("module", "is"), iter(rows))]
    return "\n\n".join(each for each in made if each)


RENDERED: Mapping[str, Callable[[], str]] = {f"map {part}": partial(map_of, part) for part in PARTS}
"""What a marker of this name is filled with."""

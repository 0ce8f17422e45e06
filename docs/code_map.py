"""The map of the code: every module, with the first sentence that it says about itself."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from docs.tables import table

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("client", "coordinator", "worker", "common")
GENERATED = "stratagem/v1"
SENTENCE = re.compile(r"(.+?)(?:\. |\.?$)")


def first_sentence(path: Path) -> str:
    """Of a module's docstring, on one line, without its full stop; "" where there is none."""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(said.partition("\n\n")[0].split())
    found = SENTENCE.match(paragraph)
    return found[1].replace("|", "\\|") if found else ""


def _modules(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py" and (said := first_sentence(path)):
            yield f"[{path.name}](../../{path.relative_to(ROOT)})", said


def map_of(part: str) -> str:
    """A table for each folder of a part, the part's own modules first."""
    folders = sorted({path.parent for path in (ROOT / part / "stratagem").rglob("*.py")})
    made = []
    for folder in folders:
        rows = list(_modules(folder))
        if rows and GENERATED not in str(folder):
            name = folder.relative_to(ROOT / part / "stratagem")
            package = folder / "__init__.py"
            about = first_sentence(package) if package.exists() else ""
            made += [f"### {name}", f"{about}." if about else "", table(("module", "is"), rows)]
    return "\n\n".join(each for each in made if each)


RENDERED: Mapping[str, Callable[[], str]] = {f"map {part}": partial(map_of, part) for part in PARTS}
"""What a marker of this name is filled with."""

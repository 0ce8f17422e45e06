"""Build the documentation as a site to read in a browser: `python docs/build_site.py [folder]`.

The pages are those of this folder, in the order of its README.md, which says each page once; a dead
link or anchor fails the build. A link to a module leads to a copy of it, so that the site is whole
without a repository beside it. It is read from a folder as from a server, its search too, and asks
nobody else for anything. The generator is zensical, which reads the configuration of mkdocs.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
HEADING: Final = re.compile(r"^## ([^:\n]+)", re.MULTILINE)
SOURCES: Final = "source"
"""The folder of the site that holds copies of modules."""
WRITTEN: Final = re.compile(r"^```python\n%%writefile (\S+\.(\w+))\n", re.MULTILINE)
"""A cell of a tutorial that writes a file: the site shows the file, under its name."""
NOT_RUN: Final = re.compile(r"^(```\w+) \.noeval$", re.MULTILINE)
SHIM: Final = "offline/iframe-worker.js"
"""A worker of its own is what a browser refuses to a page that it reads from a folder: the search
needs this in its place. Without this copy the pages would load it from elsewhere."""

Section = dict[str, list[str | dict[str, str]]]

THEME: Final = {
    "name": "material",
    "font": False,  # the pages would load it from its maker
    "features": ["navigation.tabs", "navigation.footer", "navigation.top", "content.code.copy"],
    "palette": [
        {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "indigo"},
        {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "indigo"},
    ],
}
EXTENSIONS: Final[list[Any]] = [
    "admonition",
    "attr_list",
    "md_in_html",
    "tables",
    {"toc": {"permalink": True}},
    "pymdownx.highlight",
    "pymdownx.inlinehilite",
    "pymdownx.superfences",
]


def navigation() -> list[str | Section]:
    """The pages in the order in which README.md names them, below its headings."""
    text = (DOCS / "README.md").read_text()
    found: list[str | Section] = ["README.md"]
    for title, body in _sections(text):
        pages: list[str | dict[str, str]] = [
            {words[0].upper() + words[1:]: path}
            for words, path, _ in LINK.findall(body)
            if path.endswith(".md") and not path.startswith("decisions/")
        ]
        found.append({title: pages})
    decisions = [f"decisions/{page.name}" for page in sorted((DOCS / "decisions").glob("0*.md"))]
    found.append({"Decisions": ["decisions/README.md", *decisions]})
    return found


def _sections(text: str) -> Iterator[tuple[str, str]]:
    starts = list(HEADING.finditer(text))
    for found, after in zip(starts, [*starts[1:], None], strict=True):
        yield found[1], text[found.end() : after.start() if after else len(text)]


def configuration() -> str:
    """Return the configuration of zensical as YAML; pages are in "docs", the site in "site"."""
    told = {
        "site_name": "Stratagem",
        "site_description": "Train one PyTorch model on many machines.",
        "docs_dir": "docs",
        "site_dir": "site",
        "theme": THEME,
        "nav": navigation(),
        "plugins": ["search", "offline"],
        "extra": {"polyfills": [SHIM], "generator": False},
        "markdown_extensions": EXTENSIONS,
    }
    return yaml.safe_dump(told, sort_keys=False)


def stage(pages: Path) -> None:
    """Copies the pages and their pictures to a folder, and the modules that they link to."""
    for path in sorted(DOCS.rglob("*")):
        copy = pages / path.relative_to(DOCS)
        if path.suffix == ".md":
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_with_sources(path, pages))
        elif path.suffix in (".svg", ".png", ".js"):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _with_sources(page: Path, pages: Path) -> str:
    """The text of a page, with links to copies of the modules that it links to."""
    depth = len(page.relative_to(DOCS).parts) - 1

    def linked(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        if found[2].startswith("http") or target.is_relative_to(DOCS) or not target.is_file():
            return found[0]
        name = f"{SOURCES}/{target.relative_to(ROOT)}.txt"
        copy = pages / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, copy)
        return f"[{found[1]}]({'../' * depth}{name})"

    text = WRITTEN.sub(r'```\2 title="\1"\n', page.read_text())
    return LINK.sub(linked, NOT_RUN.sub(r"\1", text))


def build(site: Path) -> int:
    """Builds the site, in place of what is in its folder; returns the generator's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder, "docs"))
        settings = Path(folder, "mkdocs.yml")
        settings.write_text(configuration())
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(settings)]
        status = subprocess.run(command, check=False).returncode
        if status == 0:
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(Path(folder, "site"), site)
        return status


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()))

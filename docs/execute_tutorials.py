"""Runs the tutorials as notebooks: `python docs/execute_tutorials.py [--write] [names]`.

A tutorial with output is a page of docs/tutorials that jupytext reads as a notebook: its blocks of
Python and of shell are cells, but for those that say `.noeval`. Each page runs in a kernel of its
own, in a folder with a copy of examples/, as in a checkout; processes that it leaves behind there
are ended, and the default address of a coordinator is a free one. A cell that fails ends this with
status 1, and so does output that is missing on the page or no longer comes. `--write` puts the
output of each cell below it, pictures into docs/images/tutorials; what differs at each run, such as
times, stays as it was.
"""

import argparse
import base64
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `tests`

from tests.free_ports import free_port

ROOT: Final = Path(__file__).resolve().parent.parent
TUTORIALS: Final = ROOT / "docs" / "tutorials"
IMAGES: Final = ROOT / "docs" / "images" / "tutorials"
TIMEOUT_S: Final = 300
"""The limit for one cell; a cluster is slow on a busy machine."""
DEFAULT_ADDRESS: Final = "127.0.0.1:7070"
"""The address of a coordinator in a page, which is replaced by another one when cells run."""

OUTPUT: Final = re.compile(r"\n<!-- output -->\n(.*?)<!-- output end -->\n", re.DOTALL)
CELL: Final = re.compile(r"^```(?:python|bash|sh)(?! \.noeval)[^\n]*\n.*?^```\n", re.DOTALL | re.M)
PICTURE: Final = re.compile(r'<img alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]*)">')
COLOUR: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
VARIES: Final = re.compile(
    r"[\d,.]+ (?:rows/s|ms|s|KB|bytes)\b|\d+:\d\d(?::\d\d)?\b|127\.0\.0\.1:\d+|"
    r"-[0-9a-f]{8}\b|(?<=\()[A-Z][\w ()-]+ ?[\w.-]*(?=\))"
)
"""Parts of outputs that differ between runs or machines."""


@dataclass
class Shown:
    """The output of a cell as Markdown, with its pictures by file name."""

    text: str
    pictures: dict[str, str]


def main(arguments: Sequence[str]) -> int:
    """Run the tutorials of these names, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the output into the pages")
    parser.add_argument("names", nargs="*", help="such as first-run; all unless given")
    told = parser.parse_args(arguments)
    pages = [page for page in tutorials() if not told.names or page.stem in told.names]
    failed = 0
    for page in pages:
        began_s = time.monotonic()
        shown = execute(page)
        faults = [] if told.write else list(differences(page, shown))
        if told.write:
            write(page, shown)
        for fault in faults:
            print(f"{page.stem}: {fault}", file=sys.stderr)
        failed += bool(faults)
        print(f"{page.stem}: {len(shown)} cells in {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{len(pages) - failed} passed, {failed} failed")
    return int(failed > 0)


def tutorials() -> list[Path]:
    """Return the pages that are notebooks: those that show output."""
    return [page for page in sorted(TUTORIALS.glob("*.md")) if OUTPUT.search(page.read_text())]


def source_of(page: Path) -> str:
    """Return the page without any output."""
    return OUTPUT.sub("", page.read_text())


def notebook(page: Path) -> Any:
    """Return the page as a notebook; ValueError when jupytext finds other cells in it than this."""
    import jupytext

    source = source_of(page)
    found = jupytext.reads(source, "md")
    num_cells = sum(cell.cell_type == "code" for cell in found.cells)
    if num_cells != len(CELL.findall(source)):
        raise ValueError(f"{page}: {num_cells} cells are not its blocks of code")
    return found


def execute(page: Path) -> list[Shown]:
    """Run all cells and return their output; nbclient's CellExecutionError says what failed."""
    from nbclient import NotebookClient
    from traitlets.config import Config

    told, address = notebook(page), f"127.0.0.1:{free_port()}"
    cells = [cell for cell in told.cells if cell.cell_type == "code"]
    for cell in cells:
        cell.source = cell.source.replace(DEFAULT_ADDRESS, address)
    with _checkout() as folder:
        # Sockets that are files: over TCP, others on this machine could read what is said.
        sockets = Config({"KernelManager": {"transport": "ipc", "ip": str(folder / ".kernel")}})
        resources = {"metadata": {"path": str(folder)}}
        client = NotebookClient(told, timeout=TIMEOUT_S, resources=resources, config=sockets)
        client.execute(env=_environment(address))
        names = (f"{page.stem}-{number}" for number in range(len(cells)))
        hidden = {f"{folder}/": "", str(folder): ".", address: DEFAULT_ADDRESS}
        return [_shown(cell.outputs, name, hidden) for cell, name in zip(cells, names, strict=True)]


def _environment(address: str) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "STRATAGEM_COORDINATOR": address,
        "STRATAGEM_COORDINATOR_LISTEN": address,
    }


@contextmanager
def _checkout() -> Iterator[Path]:
    """A folder with examples/, without the processes that work in it at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        shutil.copytree(
            ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__")
        )
        try:
            yield folder
        finally:
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    _end_if_in(folder, process)


def _end_if_in(folder: Path, process: Path) -> None:
    handle = os.pidfd_open(int(process.name))
    try:
        if (process / "cwd").readlink().is_relative_to(folder):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [])
    finally:
        os.close(handle)


def _shown(outputs: Sequence[Any], name: str, hidden: Mapping[str, str]) -> Shown:
    written, markup = "", []
    pictures: dict[str, str] = {}
    for output in outputs:
        data = output.get("data", {})
        if html := data.get("text/html"):
            markup.append(_without_pictures("".join(html), name, pictures))
        else:
            written += "".join(output.get("text", "") or data.get("text/plain", ""))
            written += "" if output.output_type == "stream" else "\n"
    text = COLOUR.sub("", written)
    for told, shown in hidden.items():
        text = text.replace(told, shown)
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.rstrip().split("\n")]
    block = "```text\n" + "\n".join(lines).strip("\n") + "\n```\n" if text.strip() else ""
    return Shown("\n".join([*([block] if block else []), *markup]), pictures)


def _without_pictures(html: str, name: str, pictures: dict[str, str]) -> str:
    """Return the HTML as Markdown that names a file for each picture."""
    parts = []
    for alt, data in PICTURE.findall(html):
        file = f"{name}-{len(pictures)}.svg"
        pictures[file] = base64.b64decode(data).decode().rstrip() + "\n"
        parts.append(f"![{alt}](../images/tutorials/{file})\n")
    rest = PICTURE.sub("", html).replace("<div></div>", "")
    rest = re.sub(r"^<div>(.*?)</div>", r"<p>\1</p>", rest)
    return "\n".join([f"{rest}\n" if rest else "", *parts]).lstrip("\n")


def written_outputs(page: Path) -> list[str]:
    """Return what stands below each cell of the page now; "" where there is nothing."""
    text, found = page.read_text(), []
    for cell in CELL.finditer(text):
        output = OUTPUT.match(text, cell.end())
        found.append(output[1] if output else "")
    return found


def differences(page: Path, shown: Sequence[Shown]) -> Iterator[str]:
    """Yield a sentence for each cell whose output is of another kind than on the page."""
    for number, (before, after) in enumerate(zip(written_outputs(page), shown, strict=True), 1):
        pictures = len(re.findall(r"^!\[", before, re.M))
        had = (bool(re.sub(r"^!\[.*$", "", before, flags=re.M).strip()), pictures)
        has = (bool(re.sub(r"^!\[.*$", "", after.text, flags=re.M).strip()), len(after.pictures))
        if had != has:
            yield f"cell {number} puts out something else than the page shows: use --write"


def write(page: Path, shown: Sequence[Shown]) -> None:
    """Put the output below each cell, and pictures into their folder."""
    kept = written_outputs(page)
    outputs = iter(zip(kept, shown, strict=True))
    IMAGES.mkdir(parents=True, exist_ok=True)
    for old in IMAGES.glob(f"{page.stem}-[0-9]*.svg"):
        old.unlink()

    def with_output(cell: re.Match[str]) -> str:
        before, after = next(outputs)
        for file, drawn in after.pictures.items():
            (IMAGES / file).write_text(drawn)
        text = _unless_only_times(before, after.text)
        return f"{cell[0]}\n<!-- output -->\n{text}<!-- output end -->\n" if text else cell[0]

    page.write_text(CELL.sub(with_output, source_of(page)))


def _unless_only_times(before: str, after: str) -> str:
    same = VARIES.sub("", before).split() == VARIES.sub("", after).split()
    return before if same else after


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

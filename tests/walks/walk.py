"""Runs a job with footprints and counts the files that a reader enters, and how often again."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.patience import PATIENCE_S
from tests.repository import ROOT

HOOK = """
import importlib.util, pathlib
spec = importlib.util.spec_from_file_location("footprints", {module!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.follow(pathlib.Path({folder!r}), {window!r}, {number})
"""


@dataclass(frozen=True, slots=True, order=True)
class Footprint:
    """The first call of a function, in a process."""

    at_s: float
    is_inside: bool
    file: str
    function: str


@dataclass(frozen=True, slots=True)
class Walk:
    """What a reader does who follows functions in the order of their first calls."""

    files: int
    returns: int
    """How often a file is entered that was left before."""


def once(footprints: Iterable[Footprint], end: str) -> Iterator[Footprint]:
    """Yield each function once, whichever processes call it, up to one with such a name."""
    seen = set()
    for each in sorted(footprints):
        if (each.file, each.function) not in seen:
            seen.add((each.file, each.function))
            yield each
        if each.function.endswith(end):
            return


def walk_of(footprints: Iterable[Footprint]) -> Walk:
    """Count the files, and the returns, of footprints in their order."""
    entered, here, returns = set[str](), "", 0
    for each in footprints:
        if each.file != here:
            returns += each.file in entered
            entered.add(each.file)
            here = each.file
    return Walk(len(entered), returns)


def footprints_of(
    job: dict[str, object], workers: int, window: str, number: int
) -> list[list[Footprint]]:
    """Run a job on a local cluster; the footprints of each process, in order of time.

    The call of this number of the window, the end of a qualified name, is what is inside.
    """
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "marks").mkdir()
        (folder / "hook").mkdir()
        module = str(Path(__file__).with_name("footprints.py"))
        hook = HOOK.format(
            module=module, folder=str(folder / "marks"), window=window, number=number
        )
        (folder / "hook" / "sitecustomize.py").write_text(hook)
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        path = os.pathsep.join([str(folder / "hook"), str(ROOT)])
        command = [sys.executable, "-m", "stratagem.program", "run", str(folder / "job.yaml")]
        command += ["--local", str(workers), "--quiet", "--data-dir", str(folder / "data")]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": path},
            cwd=ROOT,
            timeout=PATIENCE_S,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return [_read(path) for path in sorted((folder / "marks").iterdir())]


def _read(path: Path) -> list[Footprint]:
    found = []
    for line in path.read_text().splitlines():
        at_s, kind, file, function = line.split(" ", 3)
        found.append(Footprint(float(at_s), kind == "inside", file, function))
    return sorted(found)

"""Makes changes in copies of the project, one after the other, and runs the tests on each."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tests.mutants.areas import AREAS, area_of
from tests.mutants.proposals import Change
from tests.repository import ROOT

LIST = Path(__file__).with_name("changes.jsonl")
ROOTS = ("client", "common", "coordinator", "tools", "worker")
CHOSEN = "not sweep and not soak and not docker and not interop and not browser and not launch"
LIMIT_S, TEST_LIMIT_S = 600, 120
"""A change that makes tests hang is seen: after the second limit, where a test can be ended."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A change of the list."""

    change: Change
    seen_by: str = "test"
    """The tier whose tests see it: "test", or "sweep" or "soak" outside of the strict areas."""


def listed(text: str) -> list[Listed]:
    """The list that a file's text holds."""
    rows = [json.loads(line) for line in text.splitlines()]
    return [Listed(seen_by=row.pop("seen_by", "test"), change=Change(**row)) for row in rows]


class Copy:
    """A copy of the project, in which one change after the other is made and taken back."""

    def __init__(self, root: Path) -> None:
        self._root = root
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in filter(None, tracked.split("\0")):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # deleted and not yet committed
                shutil.copy2(ROOT / name, root / name)

    def num_failed(self, change: Change, stops_early: bool) -> int:
        """How many tests see a change; with `stops_early` those after the first are not run."""
        path = self._root / change.file
        before = path.read_text()
        after = change.applied(before)
        assert after is not None, f"{change.file} has no such line: {change.line.strip()}"
        path.write_text(after)
        # Two changes within a second would look like one to those who have it compiled.
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
        try:
            chosen = AREAS[area_of(change.file)].tests
            if not stops_early:
                return self._run(chosen, "--maxfail=100")
            nearest = self._importing(change.file, chosen)
            return (self._run(nearest, "-x") if nearest else 0) or self._run(chosen, "-x")
        finally:
            path.write_text(before)

    def _importing(self, file: str, folders: Sequence[str]) -> list[str]:
        """Files of tests that name the changed module."""
        module = file.partition("/")[2].removesuffix(".py").replace("/", ".")
        names = (module, f"from {module.rpartition('.')[0]} import")
        found = (
            path for each in folders for path in sorted((self._root / each).rglob("test_*.py"))
        )
        return [
            str(path.relative_to(self._root))
            for path in found
            if any(name in path.read_text() for name in names)
        ]

    def _run(self, chosen: Sequence[str], *options: str) -> int:
        """How many tests fail, at least one where they cannot even begin or do not end."""
        limit = f"--timeout={TEST_LIMIT_S}"
        command = ["-m", "pytest", "-q", limit, "-p", "no:cacheprovider", "-m", CHOSEN]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(self._root / each) for each in ROOTS),
            "HYPOTHESIS_PROFILE": "repeated",
        }
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [sys.executable, *command, *options, *chosen],
                cwd=self._root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            failed = sum(line.startswith(("FAILED", "ERROR")) for line in done.stdout.splitlines())
            return max(failed, int(done.returncode != 0))
        return 1


def run(chosen: Sequence[Listed], processes: int, stops_early: bool) -> int:
    """Prints each change with the number of tests that see it; the number of those nobody sees."""
    survivors = 0
    with contextlib.ExitStack() as stack:
        copies: Queue[Copy] = Queue()
        for _ in range(processes):
            copies.put(Copy(Path(stack.enter_context(tempfile.TemporaryDirectory()))))

        def num_failed(each: Listed) -> int:
            copy = copies.get()
            try:
                return copy.num_failed(each.change, stops_early)
            finally:
                copies.put(copy)

        pool = stack.enter_context(ThreadPoolExecutor(processes))
        for each, seen in zip(chosen, pool.map(num_failed, chosen), strict=True):
            survivors += not seen
            change = each.change
            word = "survives" if not seen else "seen" if stops_early else f"{seen} tests"
            print(
                f"{word:9} {change.file}: {change.line.strip()} -> {change.becomes.strip()}",
                flush=True,
            )
    print(f"{survivors} of {len(chosen)} survive")
    return survivors

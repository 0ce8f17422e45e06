"""A command of the product that serves a page, as a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.crash.rig import until
from tests.patience import PATIENCE_S

PROGRAM = [sys.executable, "-m", "stratagem.program"]


@dataclass
class PageProcess:
    popen: subprocess.Popen[bytes]
    said: Path
    """What it has printed, and its complaints."""

    def line(self, has: str) -> str:
        """Wait for the line that has these words."""
        until(
            lambda: bool(self._found(has)) or self.popen.poll() is not None, f"a line with {has!r}"
        )
        found = self._found(has)
        assert found, self.said.read_text()
        return found[0]

    @property
    def url(self) -> str:
        """Where it says that the page is, once it does."""
        return self.line("page ").partition(" at ")[2].split()[0]

    def end(self, signum: int) -> int:
        """Send a signal, and return the exit status once nothing of it is left."""
        children = psutil.Process(self.popen.pid).children(recursive=True)
        self.popen.send_signal(signum)
        return self.ended(children)

    def ended(self, children: list[psutil.Process] | None = None) -> int:
        """Wait for the end, and return the exit status."""
        status = self.popen.wait(PATIENCE_S)
        gone, left = psutil.wait_procs(children or [], timeout=PATIENCE_S)
        assert left == [], f"{left} outlived the command, {gone} did not"
        said = self.said.read_text()
        assert "ERROR" not in said, said
        assert "Traceback" not in said, said
        return status

    def _found(self, has: str) -> list[str]:
        lines = self.said.read_text().split("\n")[:-1]
        return [line for line in lines if has in line]


@contextmanager
def command(
    folder: Path, *words: object, environment: Mapping[str, str] | None = None
) -> Iterator[PageProcess]:
    """Run a command in a folder; it is gone at the end of the block."""
    number = len(list(folder.glob("said-*")))
    said = folder / f"said-{number}"
    with said.open("wb") as file:
        popen = subprocess.Popen(
            [*PROGRAM, *map(str, words)],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield PageProcess(popen, said)
    finally:
        if popen.poll() is None:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()

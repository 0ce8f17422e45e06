"""One child process: what to run, when it is ready, how it ends.

Used by process_supervisor.py, which decides when. Knows nothing of what the commands do.
"""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stratagem.common.process.template import Process

TAIL_BYTES: Final = 4000


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run as a child process, and the name under which it runs."""

    name: str
    argv: Callable[[Mapping[str, str]], Sequence[str]]
    """From the addresses of the processes that have been ready, this one's own included.

    The addresses of those it needs may be missing: it gets them on its standard input."""
    ready_file: Path
    log_file: Path
    environment: Mapping[str, str]
    needs: tuple[str, ...] = ()
    exit_variable: str = ""
    """Where the environment of the next process says how the last one has ended, as PID:STATUS or
    PID:stopped; empty: nowhere."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A process as it stands now."""

    name: str
    pid: int | None
    address: str
    is_ready: bool
    num_starts: int
    last_exit: int | None
    log_file: Path


def stop(processes: Sequence[Process], grace_s: float) -> None:
    """SIGTERM to all, SIGKILL to those that stay longer than grace_s."""
    for process in processes:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # a stopped process sees no SIGTERM
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_address(path: Path) -> str:
    """The address in a ready file: {"address": "host:port"}, or bare; "" while it is not there."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return ""
    return str(json.loads(text)["address"]) if text.startswith("{") else text


def size_of(log_file: Path) -> int:
    """Return the size of a log file in bytes; 0 if it has been removed."""
    try:
        return log_file.stat().st_size
    except OSError:
        return 0


def tail(path: Path, begin: int, end: int) -> str:
    """The last of what a log file holds between these bytes."""
    text = path.read_bytes()[begin:end][-TAIL_BYTES:].decode(errors="replace").strip()
    return text or "(nothing)"

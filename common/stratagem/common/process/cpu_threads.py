"""Choose the number of CPU threads of a process, and whether idle OpenMP threads spin or sleep.

A requested number counts, else that of the environment, else a default. The way of waiting must be
set before torch is imported, so the module imports nothing that takes time.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from stratagem.common.base.text import counted

VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The environment variables that set the number of threads of torch and its matrix products."""
WAITING: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""The environment variables that set whether idle OpenMP threads spin or sleep."""
CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A number of threads, and the variable that it comes from; "" if it was requested."""

    number: int
    by: str = ""

    def __str__(self) -> str:
        """Return the choice in words: "2 threads (OMP_NUM_THREADS)"."""
        return f"{counted(self.number, 'thread')}{self._reason}"

    @property
    def each(self) -> str:
        """Return the choice in words for several workers: "2 threads each (OMP_NUM_THREADS)"."""
        return f"{counted(self.number, 'thread')} each{self._reason}"

    @property
    def _reason(self) -> str:
        return f" ({self.by})" if self.by else ""


def threads_told(environ: Mapping[str, str]) -> ThreadChoice | None:
    """Return the number of threads that the environment sets, the smaller one of two variables,
    since torch knows one number for both; None if neither is set to a value that OpenMP accepts."""
    choices = [
        ThreadChoice(number, name)
        for name in VARIABLES
        if (number := _first_number(environ.get(name, "")))
    ]
    return min(choices, key=lambda choice: choice.number, default=None)


def default_threads(environ: Mapping[str, str]) -> int:
    """Return the default number of threads: the one set in the environment, else the number of
    cores that this process may use."""
    choice = threads_told(environ)
    return available_cores() if choice is None else choice.number


def passive_waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make idle OpenMP threads sleep, for a process that has not loaded
    torch; none if the operator has set one.

    By default they spin for milliseconds. On a busy machine a step of a small model then takes ten
    times as long, since waiting threads occupy the cores.
    """
    return {} if any(name in environ for name in WAITING) else {"OMP_WAIT_POLICY": "passive"}


def wait_passively() -> str:
    """Set the variables of `passive_waiting` in this process; return a sentence for the log."""
    added = passive_waiting(os.environ)
    settings = [f"{name}={os.environ[name]}" for name in WAITING if name in os.environ]
    os.environ.update(added)
    return "OpenMP waits passively" if added else f"OpenMP waits as told, {', '.join(settings)}"


def bound_cores() -> int:
    """Return the number of cores in this process's CPU affinity; control groups may allow less."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def available_cores() -> int:
    """Return the number of cores that this process may use: those it is bound to, at most as many
    as its control groups allow, and at least one."""
    if sys.platform != "linux":
        return bound_cores()
    return cores_within(bound_cores(), OWN_GROUPS, CGROUPS)


def cores_within(num_bound: int, own_groups: Path, root: Path) -> int:
    """Return the number of whole cores that num_bound cores and control groups allow, at least one.
    own_groups: like /proc/self/cgroup; root: like /sys/fs/cgroup. A fraction of a core does not
    count: a throttled thread would hold up all others.

    A fraction of a core does not count: a throttled thread would hold up all others.
    """
    quotas = [quota for folder in _folders(own_groups, root) for quota in _quotas(folder)]
    return max(1, int(min([num_bound, *quotas])))


def _first_number(text: str) -> int:
    """Return the first number of a list such as "4,2" (outermost threads); 0 for other text."""
    first = text.split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() else 0


def _folders(own_groups: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups of a process and of the groups above them. In a
    container the names may be the host's, and then only the topmost folder exists."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        home = root / controllers if controllers else root
        if controllers and "cpu" not in controllers.split(","):
            continue
        relative = PurePosixPath(path.lstrip("/"))
        yield from (home / group for group in (relative, *relative.parents))


def _quotas(folder: Path) -> Iterator[float]:
    """Yield the CPU limit of one control group in cores, from cgroup v1 or v2."""
    numbers = _numbers(folder / "cpu.max") or [
        *_numbers(folder / "cpu.cfs_quota_us"),
        *_numbers(folder / "cpu.cfs_period_us"),
    ]
    if len(numbers) == 2 and min(numbers) > 0:
        yield numbers[0] / numbers[1]


def _numbers(file: Path) -> list[float]:
    """Return the whole numbers that a file holds; none if the file is missing or says "max"."""
    try:
        return [float(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []

"""The CPU seconds of each test, with those of all processes that it has started.

`--cpu-seconds FILE` writes a line for each test. A process that outlives its test, such as a
cluster for a whole session, counts for the test during which it works.
"""

import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
PROPERTY = "cpu_s"
COLLECTION = "collection"


def children_of(pid: int) -> Iterator[int]:
    """The processes that this one has started and not waited for, by any of its threads."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        for thread in threads:
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        return


def cpu_of(pid: int) -> float:
    """CPU seconds of a process, of its ended children and of all that live below it."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    own = sum(map(int, fields[11:15])) / TICKS
    return own + sum(map(cpu_of, children_of(pid)))


def cpu_of_all() -> float:
    """CPU seconds of this process and of all below it, to date."""
    return sum(os.times()[:4]) + sum(map(cpu_of, children_of(os.getpid())))


class CpuSeconds:
    """Measures each test in the process that runs it, and sums up where the reports meet."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._last = 0.0
        self._collection = 0.0
        self._of: dict[str, float] = defaultdict(float)
        self._wall: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            now = cpu_of_all()
            # A process whose parent did not wait for it takes its time along.
            report.user_properties.append((PROPERTY, max(now - self._last, 0.0)))
            report.user_properties.append((COLLECTION, self._collection))
            self._last, self._collection = now, 0.0
        return report

    def pytest_collection_finish(self) -> None:
        """What all tests share is booked as such, and not on the first one."""
        now = cpu_of_all()
        self._collection, self._last = now - self._last, now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._wall[report.nodeid] += report.duration
        if report.when == "teardown":
            for name, seconds in report.user_properties:
                if name in (PROPERTY, COLLECTION):
                    assert isinstance(seconds, float)
                    self._of[report.nodeid if name == PROPERTY else COLLECTION] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._file:
            rows = (f"{s:.2f}\t{self._wall[name]:.2f}\t{name}\n" for name, s in self._of.items())
            self._file.write_text("".join(rows))

"""Coordinators and workers started one by one, for faults that a LocalCluster would mend at once:
a coordinator that stays away, two of them on one data folder, workers of a second one."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stratagem.common.process import template
from tests.crash.rig import until
from tests.free_ports import free_port
from tests.repository import ROOT

EXIT_FENCED = 3
"""The exit status of a coordinator that another one has taken over from."""


@dataclass(slots=True)
class Process:
    name: str
    popen: template.Process
    ready_file: Path
    log_file: Path

    @property
    def address(self) -> str:
        """Waits until the process serves."""
        until(lambda: self.ready_file.exists() or self.has_ended, f"{self.name} serves")
        assert not self.has_ended, self.log_file.read_text()
        return str(json.loads(self.ready_file.read_text())["address"])

    @property
    def has_ended(self) -> bool:
        return self.popen.poll() is not None

    def send(self, signum: int) -> None:
        self.popen.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.popen.kill()
        self.popen.wait()


@dataclass(slots=True)
class Hands:
    folder: Path
    coordinator_flags: tuple[str, ...]
    environment_of: Callable[[str], Mapping[str, str]] = lambda _name: {}
    """What a process of this name finds in its environment beside what is in ours."""
    worker_flags_of: Callable[[str], Sequence[str]] = lambda _name: ()
    processes: list[Process] = field(default_factory=list)

    def coordinator(
        self, name: str, listen: str = "127.0.0.1:0", data_dir: str = "data"
    ) -> Process:
        """A coordinator on the one data folder, unless it has one of its own."""
        flags = ("--listen", listen, "--data-dir", str(self.folder / data_dir), "--name", name)
        return self._start(name, "stratagem.coordinator", *flags, *self.coordinator_flags)

    def worker(self, name: str, coordinator: str) -> Process:
        flags = ("--coordinator", coordinator, "--name", name, "--threads", "1")
        more = ("--allow", "*:*", "--import-path", str(ROOT))
        return self._start(name, "stratagem.worker", *flags, *more, *self.worker_flags_of(name))

    def _start(self, name: str, module: str, *flags: str) -> Process:
        ready_file = self.folder / f"{name}.ready"
        ready_file.unlink(missing_ok=True)
        log_file = self.folder / f"{name}.log"
        with log_file.open("ab") as log:
            command = [sys.executable, "-m", module, *flags, "--ready-file", str(ready_file)]
            environment = {**os.environ, **self.environment_of(name)}
            popen = template.start(command, environment, log, with_input=False)
        process = Process(name, popen, ready_file, log_file)
        self.processes.append(process)
        return process

    def logs(self) -> list[tuple[str, str]]:
        """The end of every log, for a report of failure."""
        files = {process.name: process.log_file for process in self.processes}
        return [(name, file.read_text(errors="replace")[-6000:]) for name, file in files.items()]


@contextmanager
def hands(folder: Path, *coordinator_flags: str) -> Iterator[Hands]:
    """All that was started inside the block is gone at its end."""
    started = Hands(folder, coordinator_flags)
    try:
        yield started
    finally:
        for process in started.processes:
            if not process.has_ended:
                process.send(signal.SIGCONT)
                process.kill()


def free_address() -> str:
    """Where nobody listens now."""
    return f"127.0.0.1:{free_port()}"

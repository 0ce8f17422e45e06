"""Keep a few child processes running from one supervisor thread: start, watch and restart them.

All are started at once. A process that needs others reads their addresses, one per line, from its
standard input once they are ready; after a restart it gets them as arguments. A process is ready
when its ready file names an address, and is restarted when it ends; one that keeps ending soon, or
cannot be started, waits longer each time. If the thread itself fails, it ends all processes, and
every later call raises the reason. No child outlives this process, however it ends.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from stratagem.common.base.errors import NotFoundError, UnavailableError
from stratagem.common.process.template import Process, end_descriptor, start

# ---- Child process ----
#
# A child process has a command, a condition for being ready, and a way to end. The supervisor
# decides when to start it.

TAIL_BYTES: Final = 4000


@dataclass(frozen=True, slots=True)
class Command:
    """A child process to run: its name, command line, files, and the processes it depends on."""

    name: str
    argv: Callable[[Mapping[str, str]], Sequence[str]]
    """A function that returns the command line, given the addresses, by name, of the processes that
    have been ready.

    Addresses that the process needs may be missing: it reads them from its standard input.
    """
    ready_file: Path
    log_file: Path
    environment: Mapping[str, str]
    needs: tuple[str, ...] = ()
    exit_variable: str = ""
    """The environment variable by which a restarted process learns how its predecessor ended, as
    PID:STATUS or PID:stopped; empty if it is not told."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """The current state of a supervised process."""

    name: str
    pid: int | None
    address: str
    is_ready: bool
    num_starts: int
    last_exit: int | None
    log_file: Path


def stop(processes: Sequence[Process], grace_s: float) -> None:
    """End all processes by SIGTERM, and by SIGKILL those that live longer than grace_s."""
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
    """Read the address in a ready file, {"address": "host:port"} or bare; "" without a file."""
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
    """Return the end of the text between two byte offsets of a log file."""
    text = path.read_bytes()[begin:end][-TAIL_BYTES:].decode(errors="replace").strip()
    return text or "(nothing)"


# ---- Supervisor ----

log = structlog.get_logger(__name__)

BOOT_TICK_S: Final = 0.02
"""The polling interval for the ready file of a starting process."""
BLIND_TICK_S: Final = 0.2
"""The polling interval for a process whose end causes no event, as on systems other than Linux."""
STABLE_S: Final = 10.0
"""The time after which the end of a process does not count as quick."""
FREE_RESTARTS: Final = 2
MAX_DELAY_S: Final = 5.0
KILLED_BY_FAILPOINT: Final = 137


@dataclass(slots=True)
class _Child:
    command: Command
    process: Process | None = None
    end: int | None = None
    """A file descriptor that becomes readable when the process ends."""
    is_ready: bool = False
    num_starts: int = 0
    num_quick_ends: int = 0
    log_begin: int = 0
    """The offset in the log file at which the current process began."""
    last_log: tuple[int, int] = (0, 0)
    """The byte range of the previous process in the log file, to which the next one appends."""
    last_exit: int | None = None
    last_words: str = ""
    """A text on how the previous process ended, passed on in Command.exit_variable."""
    is_ordered: bool = False
    """The process has been sent a signal through this supervisor, so its end is expected."""
    problem: str = ""
    """The reason why the last attempt to start or watch the process failed."""
    started_s: float = 0.0
    due_s: float = 0.0


@dataclass(slots=True)
class ProcessSupervisor:
    """A thread that keeps child processes running; one condition variable guards all state."""

    commands: Sequence[Command]
    grace_s: float = 5.0
    _children: dict[str, _Child] = field(init=False)
    _addresses: dict[str, str] = field(init=False, default_factory=dict)
    _changed: threading.Condition = field(init=False, default_factory=threading.Condition)
    _wake: tuple[int, int] = field(init=False)
    _thread: threading.Thread = field(init=False)
    _is_closing: bool = field(init=False, default=False)
    _defect: str = field(init=False, default="")
    """The error that ended the supervisor thread; every later call raises it."""

    def __post_init__(self) -> None:
        self._children = {command.name: _Child(command) for command in self.commands}
        self._wake = os.pipe()
        # Children die with the thread that started them, so one thread starts all of them and
        # lives as long as they do. Daemon: an interpreter that exits does not wait for it.
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every process is ready. Raises an error, quoting the log, if one cannot
        start."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not all(child.is_ready for child in self._children.values()):
                self._raise_if_defective()
                for child in self._children.values():
                    self._raise_if_hopeless(child)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._is_closing:
                    raise UnavailableError(self._not_ready(timeout_s))
                self._changed.wait(left_s)

    def wait_restarted(self, name: str, num_starts: int, timeout_s: float) -> None:
        """Wait until a process has been started more than num_starts times and is ready again."""
        with self._changed:
            child = self._child(name)
            is_back = self._changed.wait_for(
                lambda: (
                    self._is_closing
                    or bool(self._defect)
                    or (child.is_ready and child.num_starts > num_starts)
                ),
                timeout_s,
            )
            self._raise_if_defective()
            if not is_back or self._is_closing:
                reason = f": {child.problem}" if child.problem else ""
                raise UnavailableError(
                    f"{name} was not started again within {timeout_s:g} s{reason}"
                )

    def views(self) -> tuple[ProcessView, ...]:
        with self._changed:
            self._raise_if_defective()
            return tuple(self._view(child) for child in self._children.values())

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a process; after SIGKILL it is gone on return, and will be restarted."""
        with self._changed:
            self._raise_if_defective()
            child = self._child(name)
            if child.process is None:
                return
            child.process.send_signal(signum)
            child.is_ordered |= signum not in (signal.SIGSTOP, signal.SIGCONT)
            if signum == signal.SIGKILL:
                child.process.wait()
                self._note_end(child)
        self._poke()

    def close(self) -> None:
        """End all processes by SIGTERM, and by SIGKILL those that live longer than grace_s.
        Idempotent."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        self._poke()
        if self._thread.ident is not None:
            self._thread.join()
        for descriptor in self._wake:
            os.close(descriptor)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._is_closing:
                with self._changed:
                    for child in self._children.values():
                        self._try_to_look_after(child)
                    timeout_s = self._next_look_s()
                self._wait(timeout_s)
        except BaseException as error:  # without this thread no process would be started again
            log.error("the supervisor of local processes has failed", exc_info=error)
            with self._changed:
                self._defect = f"{type(error).__name__}: {error}"
        finally:
            self._stop_all()

    def _try_to_look_after(self, child: _Child) -> None:
        """Check on one process and act. A failure, such as a full disk, is retried later and
        affects no other process."""
        try:
            self._look_after(child)
            return
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem != child.problem:
            log.warning("cannot look after a process", process=child.command.name, reason=problem)
        child.problem = problem
        child.num_quick_ends += 1
        delay_s = max(BOOT_TICK_S, _restart_delay_s(child.num_quick_ends))
        child.due_s = time.monotonic() + delay_s
        self._changed.notify_all()

    def _look_after(self, child: _Child) -> None:
        if child.process is None:
            if time.monotonic() >= child.due_s:
                self._spawn(child)
        elif child.process.poll() is not None:
            self._note_end(child)
        elif not child.is_ready:
            self._tell_addresses(child)
            address = read_address(child.command.ready_file)
            if address:
                self._addresses[child.command.name] = address
                child.is_ready = True
                self._changed.notify_all()

    def _has_needs(self, child: _Child) -> bool:
        # "has been ready once" is enough: a process that is needed comes back at the same address.
        return all(name in self._addresses for name in child.command.needs)

    def _tell_addresses(self, child: _Child) -> None:
        """Write the addresses that a process waits for to its standard input."""
        assert child.process is not None
        pipe = child.process.stdin
        if pipe is None or pipe.closed or not self._has_needs(child):
            return
        text = "".join(f"{self._addresses[name]}\n" for name in child.command.needs)
        with suppress(BrokenPipeError), pipe:
            pipe.write(text.encode())

    def _spawn(self, child: _Child) -> None:
        """Start a process, and record it at once, so that it is not lost if a later line fails."""
        command = child.command
        command.ready_file.unlink(missing_ok=True)
        argv = command.argv(self._addresses)
        environment = dict(command.environment)
        if command.exit_variable and child.last_words:
            environment[command.exit_variable] = child.last_words
        with command.log_file.open("ab") as log:
            child.log_begin = log.tell()
            child.process = start(argv, environment, log, with_input=not self._has_needs(child))
        child.num_starts += 1
        child.started_s = time.monotonic()
        child.problem = ""
        self._changed.notify_all()
        if sys.platform == "linux":
            with suppress(OSError):  # without one it is polled
                child.end = end_descriptor(child.process)

    def _note_end(self, child: _Child) -> None:
        assert child.process is not None
        now_s = time.monotonic()
        if child.process.stdin is not None:
            child.process.stdin.close()
        child.last_exit = child.process.returncode
        child.last_log = (child.log_begin, size_of(child.command.log_file))
        how = "stopped" if child.is_ordered else child.last_exit
        child.last_words = f"{child.process.pid}:{how}"
        child.process, child.is_ready = None, False
        if child.end is not None:
            os.close(child.end)
            child.end = None
        # An ordered end does not predict the next one.
        is_ordered = child.is_ordered or child.last_exit == KILLED_BY_FAILPOINT
        child.is_ordered = False
        is_quick = now_s - child.started_s < STABLE_S and not is_ordered
        child.num_quick_ends = child.num_quick_ends + 1 if is_quick else 0
        child.due_s = now_s + _restart_delay_s(child.num_quick_ends)
        self._changed.notify_all()

    def _next_look_s(self) -> float | None:
        """Return the seconds until the next check if no event comes; None to wait for an event."""
        looks: list[float] = []
        for child in self._children.values():
            if child.process is None:
                looks.append(max(0.0, child.due_s - time.monotonic()))
            elif not child.is_ready:
                looks.append(BOOT_TICK_S)
            elif child.end is None:
                looks.append(BLIND_TICK_S)
        return min(looks, default=None)

    def _wait(self, timeout_s: float | None) -> None:
        poller = select.poll()
        poller.register(self._wake[0], select.POLLIN)
        with self._changed:
            for child in self._children.values():
                if child.end is not None:
                    poller.register(child.end, select.POLLIN)
        ready = poller.poll(None if timeout_s is None else timeout_s * 1000)
        if any(descriptor == self._wake[0] for descriptor, _ in ready):
            os.read(self._wake[0], 4096)

    def _stop_all(self) -> None:
        """Stop all processes, dependent ones first, so that they can still report to the others."""
        with self._changed:
            children = self._children.values()
            for group in ([c for c in children if c.command.needs], list(children)):
                running = [child.process for child in group if child.process is not None]
                stop(running, self.grace_s)
                for child in group:
                    if child.process is not None:
                        self._note_end(child)

    def _child(self, name: str) -> _Child:
        if name not in self._children:
            names = ", ".join(self._children)
            raise NotFoundError(f"no process {name!r}; there are {names}")
        return self._children[name]

    def _poke(self) -> None:
        os.write(self._wake[1], b"x")

    # ---- words ----

    def _raise_if_defective(self) -> None:
        if self._defect:
            raise UnavailableError(
                f"the processes have ended, because their supervisor has failed: {self._defect}"
            )

    def _raise_if_hopeless(self, child: _Child) -> None:
        """Raise an error if a process could not be started, or failed before it was ever ready, as
        a retry would not help."""
        has_been_ready = child.command.name in self._addresses
        if child.problem and not has_been_ready:
            raise UnavailableError(f"{child.command.name} cannot be started: {child.problem}")
        status = child.last_exit
        if has_been_ready or status is None or status < 0 or status == KILLED_BY_FAILPOINT:
            return
        log_file = child.command.log_file
        raise UnavailableError(
            f"{child.command.name} ended with status {status} before it was ready; "
            f"{log_file} ends with:\n{tail(log_file, *child.last_log)}"
        )

    def _not_ready(self, timeout_s: float) -> str:
        waiting = [child for child in self._children.values() if not child.is_ready]
        logs = waiting[0].command.log_file.parent if waiting else ""
        names = [
            f"{child.command.name} ({child.problem})" if child.problem else child.command.name
            for child in waiting
        ]
        return f"not ready after {timeout_s:g} s: {', '.join(names)}; their logs are in {logs}"

    def _view(self, child: _Child) -> ProcessView:
        return ProcessView(
            name=child.command.name,
            pid=None if child.process is None else child.process.pid,
            address=self._addresses.get(child.command.name, ""),
            is_ready=child.is_ready,
            num_starts=child.num_starts,
            last_exit=child.last_exit,
            log_file=child.command.log_file,
        )


def _restart_delay_s(num_quick_ends: int) -> float:
    """Return the pause before a restart: none for the first ones, then 0.2 s to MAX_DELAY_S."""
    if num_quick_ends <= FREE_RESTARTS:
        return 0.0
    return min(MAX_DELAY_S, 0.1 * 2.0 ** min(num_quick_ends - FREE_RESTARTS, 16))

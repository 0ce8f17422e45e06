"""Record the end of this process, for the next worker process of the same name.

The record is two files of the data folder: one in shared memory with the present plan, the step,
and the lines that the job's code prints; one with the explanation of a fatal signal. They outlive
SIGKILL and cost a training step a microsecond. The next process reads both before it registers, and
replaces them afterwards, so a process that ends before that leaves no record.
"""

import faulthandler
import json
import mmap
import os
import re
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import structlog
import torch

from stratagem.common.base.errors import UserCodeError, led_to
from stratagem.common.base.files import create_private
from stratagem.v1 import coordinator_pb2 as pb

# ---- Exit record ----

log = structlog.get_logger(__name__)

MAX_LINES: Final = 10
MAX_LINE_CHARS: Final = 300
MAX_FRAMES: Final = 4
"""Maximum number of stack frames that are reported for a fatal signal."""
_NOT_THE_USERS: Final = ("/site-packages/", "/lib/python", "/stratagem/worker/")
"""Parts of paths that show that code is not the job's."""
_HEAD: Final = struct.Struct("<8sqqII")
"""Header: magic number, step, bytes printed so far, whether it was stopped, length of the text."""
_MAGIC: Final = b"lastwrd1"
_STEP, _PRINTED, _STOPPED, _LENGTH = 8, 16, 24, 28
_TEXT: Final = 64
_LINES: Final = 2048
_SIZE: Final = 16384
_ROOM: Final = _SIZE - _LINES
_FAULTS: Final = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


class LastWords:
    """The exit record of this process, and the one of the previous process (`previous`).

    Without a folder there is neither.
    """

    def __init__(
        self, folder: Path | None, name: str, incarnation: str, supervisor: str = ""
    ) -> None:
        """Read the previous process's record. supervisor: see WorkerSettings.previous_exit."""
        self.previous = pb.PreviousExit()
        self._map: mmap.mmap | None = None
        self._run_id = ""
        self._incarnation = incarnation
        self._file, self._faults = None, None
        self._fault_file: IO[bytes] | None = None
        if folder is None:
            return
        self._file, self._faults = folder / f"{name}.last-words", folder / f"{name}.fault"
        self._record = folder / f"{name}.last-words.{incarnation}"
        self._own_faults = folder / f"{name}.fault.{incarnation}"
        self.previous = _read(self._file, self._faults, supervisor)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in (*folder.glob(f"{name}.last-words.*"), *folder.glob(f"{name}.fault.*")):
                stale.unlink(missing_ok=True)
            self._begin()
        except OSError as error:
            log.warning("the next process will not be told how this one ended", reason=str(error))

    def _begin(self) -> None:
        with create_private(self._record) as file:
            # After truncate, a page for which a full disk has no room would end us with SIGBUS.
            file.write(bytes(_SIZE))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        _HEAD.pack_into(self._map, 0, _MAGIC, -1, 0, 0, 0)
        self._say({"incarnation": self._incarnation, "pid": os.getpid()})

    def explain_faults(self) -> None:
        """Write an explanation of fatal signals to the record, by faulthandler."""
        if self._map is not None:
            self._fault_file = create_private(self._own_faults)
            faulthandler.enable(self._fault_file, all_threads=False)

    def registered(self) -> None:
        """Replace the previous process's record, after the coordinator has received it."""
        if self._file is not None and self._faults is not None:
            for source, file in ((self._record, self._file), (self._own_faults, self._faults)):
                with suppress(OSError):  # done before, removed, or a folder without write access
                    source.replace(file)

    def stopped(self) -> None:
        """Record that this process was asked to end, so that its work is not blamed."""
        if self._map is not None:
            struct.pack_into("<I", self._map, _STOPPED, 1)

    # ---- Calls in the torch thread ----

    @contextmanager
    def at(self, run_id: str, party: str) -> Iterator[None]:
        """Context manager inside which the record names this plan as running."""
        if self._map is None:
            yield
            return
        if run_id != self._run_id:  # only those who may see the run may see its lines
            struct.pack_into("<q", self._map, _PRINTED, 0)
            self._run_id = run_id
        self.step(-1)
        who = {"incarnation": self._incarnation, "pid": os.getpid()}
        self._say({**who, "run_id": run_id, "party": party})
        try:
            yield
        finally:
            self._say(who)

    def step(self, number: int) -> None:
        """Record the number of applied steps; while a client trains, the number of steps begun."""
        if self._map is not None:
            struct.pack_into("<q", self._map, _STEP, number)

    def line(self, text: str) -> None:
        """Record a line printed by the job's code."""
        if self._map is None:
            return
        data = text[:MAX_LINE_CHARS].encode(errors="replace") + b"\n"
        (printed,) = struct.unpack_from("<q", self._map, _PRINTED)
        begin = printed % _ROOM
        first = data[: _ROOM - begin]
        self._map[_LINES + begin : _LINES + begin + len(first)] = first
        rest = data[len(first) :]
        self._map[_LINES : _LINES + len(rest)] = rest
        struct.pack_into("<q", self._map, _PRINTED, printed + len(data))

    def _say(self, words: dict[str, Any]) -> None:
        assert self._map is not None
        data = json.dumps(words).encode()[: _LINES - _TEXT]
        struct.pack_into("<I", self._map, _LENGTH, 0)  # a process may end between any two writes
        self._map[_TEXT : _TEXT + len(data)] = data
        struct.pack_into("<I", self._map, _LENGTH, len(data))


# ---- Record of the previous process ----


def _read(file: Path, faults: Path, supervisor: str) -> pb.PreviousExit:
    """Read the record of the previous process; empty if there is none."""
    try:
        data = file.read_bytes()
        magic, step, printed, stopped, length = _HEAD.unpack_from(data)
        words = json.loads(data[_TEXT : _TEXT + length]) if length else {}
    except FileNotFoundError:
        return pb.PreviousExit()
    except (OSError, ValueError, struct.error):
        log.warning("what the process before has left cannot be read", file=str(file))
        return pb.PreviousExit()
    if magic != _MAGIC or not isinstance(words, dict) or "incarnation" not in words:
        return pb.PreviousExit()
    last = pb.PreviousExit(incarnation=words["incarnation"], stopped=bool(stopped), knows_work=True)
    if "run_id" in words:
        last.session.run_id, last.session.party = words["run_id"], words["party"]
        if step >= 0:
            last.step = step
        last.last_lines.extend(_lines(data[_LINES:_SIZE], printed))
    _add_status(last, words.get("pid"), supervisor)
    _add_fault(last, faults)
    return last


def _lines(ring: bytes, printed: int) -> list[str]:
    if printed <= _ROOM:
        text = ring[:printed]
    else:
        begin = printed % _ROOM
        text = (ring[begin:] + ring[:begin]).partition(b"\n")[2]
    return [_printable(line) for line in text.decode(errors="replace").splitlines()[-MAX_LINES:]]


def _printable(text: str) -> str:
    """Return a line without control characters, which could manipulate a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_LINE_CHARS]


def _add_status(last: pb.PreviousExit, pid: object, supervisor: str) -> None:
    """Add the exit status from the supervisor, "[PID:]STATUS" or "[PID:]stopped", if it is about
    the same process."""
    of, _, status = supervisor.rpartition(":")
    if not status or (of and of != str(pid)):
        return
    if status == "stopped":
        last.stopped = True
    else:
        number = int(status)
        last.status = 128 - number if 128 < number < 128 + 32 else number  # as in shells


def _add_fault(last: pb.PreviousExit, faults: Path) -> None:
    """Add the fatal signal, and the line of the job's code, from faulthandler's output."""
    try:
        lines = faults.read_text(errors="replace").splitlines()
    except OSError:
        return
    fault = re.match(r"Fatal Python error: (.*)", lines[0]) if lines else None
    if fault is None:
        return
    log.warning("the process before ended by a fault", trace=lines)
    if not last.HasField("status") and fault[1] in _FAULTS:
        last.status = -signal.Signals[_FAULTS[fault[1]]]
    found_frames = (line.strip() for line in lines if line.lstrip().startswith("File "))
    frames = list(dict.fromkeys(found_frames))  # recursion once
    last.last_lines.extend(map(_printable, [lines[0], *_shown_frames(frames)]))
    del last.last_lines[: max(0, len(last.last_lines) - MAX_LINES)]


def _shown_frames(frames: list[str]) -> list[str]:
    """Return a few frames, innermost first, including the innermost one of the user's code.

    The user's frame is the first one in no installed package and in no library of Python.
    """
    users_frame = next(
        (frame for frame in frames if not any(part in frame for part in _NOT_THE_USERS)), None
    )
    innermost = frames[:MAX_FRAMES]
    if users_frame is None or users_frame == frames[0]:
        return innermost
    return [users_frame, *(frame for frame in innermost if frame != users_frame)][:MAX_FRAMES]


def check_previous_exit(value: str) -> str:
    """Raise ValueError for a malformed text of a supervisor."""
    _, _, status = value.rpartition(":")
    if value and status != "stopped":
        try:
            int(status)
        except ValueError:
            raise ValueError(f"{value!r} is neither [PID:]STATUS nor [PID:]stopped") from None
    return value


# ---- Faults of a CUDA device ----
#
# After a failed assertion in a kernel, or a failure of the device, every later call of the process
# fails, so the process must be replaced. Errors of a single call, such as a lack of memory, are not
# among these. The driver's message tells the cause: an assertion fails because of the job's
# numbers, and would fail on any device.

_OF_THE_JOB: Final = ("device-side assert triggered",)
_OF_THE_DEVICE: Final = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable",
    "contained",
    "unspecified launch failure",
    "launch timed out",
    "unknown error",
)
"""The driver's messages for lasting errors (CUDA Runtime API, cudaError_t): those that leave "the
process in an inconsistent state"."""
HINT: Final = (
    "An index was outside of its table, such as a label that is not below the number of classes; "
    "on a CPU, or with CUDA_LAUNCH_BLOCKING=1, the error names the line."
)


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """The reason why this process cannot use its device any more."""

    reason: str
    """The driver's message about the fault."""
    is_the_jobs: bool
    """True if the job would cause the fault on any device."""


def device_fault(error: BaseException) -> DeviceFault | None:
    """Return the device fault behind this error or its causes; None if there is none."""
    for behind in led_to(error):
        if isinstance(behind, torch.AcceleratorError):
            reason = str(behind).partition("\n")[0]
            for signs, is_the_jobs in ((_OF_THE_JOB, True), (_OF_THE_DEVICE, False)):
                if any(sign in reason for sign in signs):
                    return DeviceFault(reason, is_the_jobs)
    return None


def told_fault(error: BaseException, fault: DeviceFault, activity: str) -> UserCodeError:
    """Return an error that blames the job for a device fault. The failing call may come later than
    the cause, since devices work asynchronously."""
    trace = error.traceback if isinstance(error, UserCodeError) else ""
    named = f"{fault.reason}. {HINT}"
    return UserCodeError("torch.AcceleratorError", named, trace, activity=activity)


@dataclass(slots=True)
class DeviceHealth:
    """The health of this process's device. Written in the torch thread."""

    fault: DeviceFault | None = None
    on_lost: Callable[[DeviceFault], None] = field(default=lambda _: None)
    """Called once with the fault, in the torch thread."""

    def lose(self, fault: DeviceFault) -> None:
        """Note that the device is lost; later faults are ignored as consequences."""
        if self.fault is None:
            self.fault = fault
            self.on_lost(fault)

"""Tune the allocator, manage temporary folders, and check settings at the start of a process."""

import ctypes
import fcntl
import os
import platform
import shutil
import tempfile
from contextlib import suppress
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from stratagem.common.base.errors import InvalidInputError

if TYPE_CHECKING:
    from pydantic import ValidationError

# ---- Allocator ----
#
# By default glibc maps, faults in and gives back every chunk once per copy, and these page faults
# bound the speed of a Python gRPC stream: with the four values below it is 2 to 4 times as fast
# (benchmarks/tensor_stream.py). Only all four together help. The tuning must happen before the
# first big allocation, so at the start of a process.

SWITCH: Final = "STRATAGEM_MALLOC"

_VALUES: Final = (
    ("M_MMAP_THRESHOLD", -3, 32 * 2**20),
    ("M_TRIM_THRESHOLD", -1, 256 * 2**20),
    ("M_TOP_PAD", -2, 64 * 2**20),
    ("M_ARENA_MAX", -8, 1),  # else a thread could not use what another one has freed
)


_said = "malloc: never tuned in this process"


def malloc_note() -> str:
    """Return the sentence in which `tune_malloc` said how it has configured this process."""
    return _said


def tune_malloc() -> str:
    """Set four options of the C library's allocator, except those that the operator has set; return
    a sentence for the log."""
    global _said
    _said = _tuned()
    return _said


def give_back() -> None:
    """Return freed memory to the operating system, even inside the heap; this takes milliseconds,
    and page faults on later use. Does nothing if the C library cannot do it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _tuned() -> str:
    if os.environ.get(SWITCH, "").lower() == "off":
        return f"malloc: left alone, {SWITCH}=off"
    keys = sorted(name for name in os.environ if name.startswith("MALLOC_") or name == "LD_PRELOAD")
    if keys:
        return f"malloc: left alone, {', '.join(keys)} set by the operator"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return "malloc: left alone, this C library has no mallopt"
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    refused = [name for name, parameter, value in _VALUES if mallopt(parameter, value) != 1]
    if refused:
        return f"malloc: {', '.join(refused)} refused by the C library"
    return "malloc: tuned for chunks of a tensor stream"


# ---- Folders of a process ----
#
# Each of these folders belongs to one process; folders of killed processes are removed.
#
# A folder is locked while its process lives: the kernel drops the lock of a killed process,
# whatever container it ran in. A free lock therefore shows that nobody uses the folder any more.

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnFolder:
    """A private folder that is removed at the end of the process that made it."""

    def __init__(self, place: Path, prefix: str) -> None:
        """Make the folder in `place`, with a name that begins with the prefix."""
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))  # its mode is 0700
            try:
                self._lock: int | None = os.open(self.path, _FLAGS)
            except FileNotFoundError:  # a cleaner came between the two calls
                continue
            with suppress(OSError):  # there are no locks here, so no cleaner gets one either
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():  # else a cleaner held the lock
                return
            os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder and its content. Idempotent."""
        if self._lock is not None:
            with suppress(OSError):
                remove_tree(self.path)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_abandoned(place: Path, prefix: str) -> None:
    """Remove the folders with this prefix that dead processes of this user have left.

    In a place that machines share, a prefix must belong to one of them: they may not see each
    other's locks.
    """
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError):  # removed already, in use, another user's, or no folder
            descriptor = os.open(folder, _FLAGS)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(folder)
            finally:
                os.close(descriptor)


def machine_prefix() -> str:
    """Return the name prefix of this machine's temporary folders: it identifies machine and boot,
    so that machines which share the place but do not see each other's locks remove only theirs."""
    try:
        booted = _BOOT.read_text()
    except OSError:  # not Linux
        booted = platform.node()
    return f"stratagem-{blake2s(booted.encode(), digest_size=4).hexdigest()}-"


def temporary_folder(kind: str, place: Path | None = None) -> OwnFolder:
    """Make a private temporary folder, and remove those that killed processes have left. kind: a
    word for its name. place: the temporary directory unless given."""
    remove_temporary(place)
    return OwnFolder(place or Path(tempfile.gettempdir()), f"{machine_prefix()}{kind}-")


def remove_temporary(place: Path | None = None) -> None:
    """Remove the temporary folders of killed processes of this machine and user.

    place: the temporary directory unless given, and /tmp, which holds sockets if the former's name
    is too long for them.
    """
    for folder in {Path(tempfile.gettempdir()), Path("/tmp")} if place is None else {place}:
        remove_abandoned(folder, machine_prefix())


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, even folders that are not writable."""
    with suppress(FileNotFoundError):
        for where, _, _ in os.walk(path):
            os.chmod(where, 0o700)
        shutil.rmtree(path)


# ---- Settings ----
#
# Both processes refuse contradictory settings at their start, since the error would otherwise
# show hours later. Wrong settings are described for an operator.

HEARTBEATS_PER_TTL: Final = 2.4
"""The least number of heartbeats that a worker's lease must leave time for: with fewer, one late
heartbeat would lose the worker."""


def at_least(settings: Any, large: str, small: str, times: float, why: str) -> None:
    """Raise ValueError, naming both, unless setting `large` is at least `times` setting `small`."""
    value, other = getattr(settings, large), getattr(settings, small)
    if value < times * other:
        factor = "" if times == 1 else f"{times:g} times "
        raise ValueError(
            f"{flag(large)} is {value:g} and must be at least {factor}{flag(small)}, which is "
            f"{other:g}: {why}"
        )


def flag(name: str) -> str:
    """Return the command-line option of a setting."""
    return f"--{name.replace('_', '-')}"


def told(program: str, error: "ValidationError") -> str:
    """Describe the errors in the command-line settings of a program, one line for each."""
    lines = []
    for detail in error.errors():
        where = ".".join(map(str, detail["loc"]))
        cause = detail.get("ctx", {}).get("error")
        text = detail["msg"].removeprefix("Value error, ")
        if isinstance(cause, InvalidInputError) and cause.violations:
            text = "; ".join(fault.message for fault in cause.violations)  # the flag is their field
        lines.append(f"{program}: {flag(where)}: {text}" if where else f"{program}: {text}")
    return "\n".join(lines)

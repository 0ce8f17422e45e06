"""The holder of the lead: one start of one process on one host.

Determines whether a holder on this host is still alive, which lets the next coordinator take over
from a crashed one without waiting. Of a holder elsewhere nothing can be known here.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

_STATE_FIELD = 0  # of /proc/<pid>/stat, counted after the command, which may hold spaces
_START_FIELD = 19


@dataclass(frozen=True, slots=True)
class Holder:
    """A process, identified by host, pid and start; `name` is for display."""

    name: str
    host: str
    """Host name, boot and pid namespace; "" where the system does not reveal them."""
    pid: int
    started: int
    """Clock ticks between the boot and the start of the process: tells a reused pid apart."""
    address: str = ""
    """host:port at which it serves, which other coordinators give to callers while it leads."""

    @classmethod
    def of_this_process(cls, name: str = "", address: str = "") -> Self:
        """Return this process, as the holder it would be."""
        pid = os.getpid()
        stat = _stat(pid)
        started = int(stat[_START_FIELD]) if stat else 0
        name = name or f"{socket.gethostname()}:{pid}"
        return cls(name, _this_host(), pid, started, address)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the holder that `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the holder as one line of JSON."""
        return json.dumps(asdict(self))

    def is_known_dead(self) -> bool:
        """Return True when the process ran on this host and has ended; False also when in doubt."""
        if not self.host or self.host != _this_host():
            return False
        stat = _stat(self.pid)
        return stat is None or stat[_STATE_FIELD] in "ZX" or int(stat[_START_FIELD]) != self.started


def _this_host() -> str:
    """Return an identifier of this host. Containers may share a boot id, and even a host name, but
    then not a pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state on; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()

"""Runs a command that cannot outlive the thread that started it.

    python -I -S parent_guard.py PARENT_PID COMMAND [ARGUMENT...]

Asks the kernel to SIGKILL this process when its parent dies, for any reason, then
becomes the command (the wish survives exec). Run as a file by client/local/supervisor.py; imports
nothing of this package, so that it costs milliseconds. Elsewhere than on Linux it only becomes the
command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def guarded(command: "list[str]") -> "list[str]":
    """The command line that runs a command so, for the thread that calls this."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the wish was made
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

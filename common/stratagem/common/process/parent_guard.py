"""Run a command that cannot outlive the thread that started it.

    python -I -S parent_guard.py PARENT_PID COMMAND [ARGUMENT...]

The program asks the kernel to SIGKILL this process when its parent dies, for any reason, then
becomes the command (the request survives exec). client/local/supervisor.py runs it as a file; it
imports nothing of this package, so it costs milliseconds. On systems other than Linux it only
becomes the command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def guarded(command: "list[str]") -> "list[str]":
    """Return a command line that runs the command through this program, so that the command ends
    when the calling thread does."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the request
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

"""`python -m stratagem.worker.data.reader FD PARENT`: one reader, over an inherited socket."""

import ctypes
import os
import signal
import sys
import traceback
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_OTHERS_SIGNALS: Final = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "XCPU")
"""What a terminal or a scheduler sends to all processes of a worker; the worker ends its readers.
A handler that does nothing is not inherited by programs that the user's code starts."""


def _end_with(parent: int) -> None:
    """Has the kernel end this process with the thread that started it, whatever ends that."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(0)


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    for name in _OTHERS_SIGNALS:
        signal.signal(getattr(signal, f"SIG{name}"), lambda *_: None)

    from stratagem.worker.data.reader.reader_loop import serve

    try:
        serve(int(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # its data set need not be taken apart

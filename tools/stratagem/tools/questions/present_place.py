"""Where a thread is, in words, for the process that waits for it."""

import sys
import traceback

from stratagem.worker.host.stalls import StackFrame, cause_of
from stratagem.worker.user_code.bundles import plain_path


def place_of_thread(ident: int) -> str:
    """Return where a thread is: the innermost line of the user's code; "" where it has ended."""
    frame = sys._current_frames().get(ident)
    stack = [
        StackFrame(
            str(each.f_globals.get("__name__", "")),
            plain_path(each.f_code.co_filename),
            line,
            each.f_code.co_name,
        )
        for each, line in traceback.walk_stack(frame)
    ]
    return cause_of(stack, ()).place if frame is not None else ""

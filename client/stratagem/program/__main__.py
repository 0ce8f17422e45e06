"""The program `stratagem`: a package of its own, so nothing is imported before Ctrl-C is handled.

All other imports take half a second; those of a local cluster take longer, and are begun first.
"""

import gc
import os
import signal
import sys
from types import FrameType
from typing import Final

INTERRUPTED: Final = 128 + signal.SIGINT

FOLLOWING: Final = (["run"], ["resume"], ["attach"])
"""Commands that show something as it happens; they print a first text before the imports."""
STARTING: Final = (["run"], ["resume"])
"""Commands that start a cluster where `--local` is given."""
ERASED: Final = "\r\x1b[K"


def main() -> None:
    """Run a command; SIGINT, as Ctrl-C sends it, ends it without a traceback at any time.

    A shell without job control starts commands with `&` with SIGINT ignored, and their children
    inherit that: without a handler, a cluster in a script would hear neither Ctrl-C nor `kill
    -INT`.
    """
    signal.signal(signal.SIGINT, _end)
    is_awaited = sys.argv[1:2] in FOLLOWING and sys.stdout.isatty()
    if is_awaited:
        print("loading stratagem …", end="", flush=True)
    if _starts_cluster(sys.argv[1:]):
        from stratagem.common.process import template

        template.prepare()
    gc.disable()  # a tenth of the time of these imports, and finds nothing
    from stratagem.client.cli.main import assemble
    from stratagem.client.cli.shared import complain_of_warnings
    from stratagem.client.terminal.completion import answer_shells

    app = assemble(sys.argv[1:])
    gc.freeze()
    gc.enable()
    if is_awaited:
        print(ERASED, end="", flush=True)
    complain_of_warnings()
    answer_shells()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _starts_cluster(words: list[str]) -> bool:
    """Return whether a command, provided that it is valid, starts processes on this machine."""
    is_local = any(word == "--local" or word.startswith("--local=") for word in words)
    is_question = any(word in ("--help", "-h") for word in words)
    return not is_question and (words[:1] == ["up"] or (words[:1] in STARTING and is_local))


def _end(_signal: int, _frame: FrameType | None) -> None:
    # Nothing has begun. An exception could be taken by one of the imports for a failure of its own.
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

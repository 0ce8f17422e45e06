"""`python -m stratagem.worker`: one worker process."""

import signal

from stratagem.common.ending import end, leave_on
from stratagem.common.malloc import tune_malloc

# Before anything large is allocated, and so before torch is imported.
_MALLOC = tune_malloc()

if __name__ == "__main__":
    # What `--preempt-signal` is unless it is set, too: nobody has read the settings yet.
    leave_on(signal.SIGTERM, signal.SIGUSR1)

    import sys

    from stratagem.worker.main import main

    end(main(sys.argv[1:], _MALLOC))

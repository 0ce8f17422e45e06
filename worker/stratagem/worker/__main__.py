"""`python -m stratagem.worker`: one worker process."""

import signal

from stratagem.common.process.malloc import tune_malloc
from stratagem.common.process.process_exit import end, leave_on

# Before anything large is allocated, and so before torch is imported.
_MALLOC = tune_malloc()

if __name__ == "__main__":
    # What `--preempt-signal` is unless it is set, too: nobody has read the settings yet.
    leave_on(signal.SIGTERM, signal.SIGUSR1)

    import sys

    from stratagem.worker.process.worker_main import main

    end(main(sys.argv[1:], _MALLOC))

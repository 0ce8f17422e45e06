"""`python -m stratagem.worker`: one worker process."""

import gc
import os
import signal
import sys

from stratagem.common.process.cpu_threads import wait_passively
from stratagem.common.process.process import tune_malloc
from stratagem.common.process.process_exit import PREEMPTED, end, leave_on

# Before anything large is allocated, and so before torch is imported.
_MALLOC, _WAITING = tune_malloc(), wait_passively()

if __name__ == "__main__":
    # Nobody has read the settings yet: USR1 is what `--preempt-signal` is unless it is set.
    is_launched = "STRATAGEM_WORKER_RENDEZVOUS" in os.environ or any(
        argument.startswith("--rendezvous") for argument in sys.argv
    )
    leave_on(signal.SIGTERM, signal.SIGUSR1, status=PREEMPTED if is_launched else 0)

    gc.disable()  # a sixth of the time of the import, and finds nothing
    from stratagem.worker.process.main import main

    gc.enable()
    end(main(sys.argv[1:], _MALLOC, _WAITING))

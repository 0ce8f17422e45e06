"""`python -m stratagem.worker`: one worker process."""

from stratagem.common.malloc import tune_malloc
from stratagem.common.signals import leave_on_sigterm

# Before anything large is allocated, and so before torch is imported.
_MALLOC = tune_malloc()

if __name__ == "__main__":
    leave_on_sigterm()

    import sys

    from stratagem.worker.main import main

    sys.exit(main(sys.argv[1:], _MALLOC))

"""`python -m stratagem.coordinator`."""

import gc
import signal

from stratagem.common.process.process_exit import leave_on

if __name__ == "__main__":
    leave_on(signal.SIGTERM)

    gc.disable()  # a sixth of the time of the import, and finds nothing
    from stratagem.coordinator.process.main import main

    gc.enable()
    main()

"""`python -m stratagem.coordinator`."""

import signal

from stratagem.common.process.process_exit import leave_on

if __name__ == "__main__":
    leave_on(signal.SIGTERM)

    from stratagem.coordinator.process.main import main

    main()

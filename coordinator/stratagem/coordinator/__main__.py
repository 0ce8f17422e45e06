"""`python -m stratagem.coordinator`."""

import signal

from stratagem.common.ending import leave_on

if __name__ == "__main__":
    leave_on(signal.SIGTERM)

    from stratagem.coordinator.main import main

    main()

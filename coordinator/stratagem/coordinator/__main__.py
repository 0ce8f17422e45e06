"""`python -m stratagem.coordinator`."""

from stratagem.common.signals import leave_on_sigterm

if __name__ == "__main__":
    leave_on_sigterm()

    from stratagem.coordinator.main import main

    main()

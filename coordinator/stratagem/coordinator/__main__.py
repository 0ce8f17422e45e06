"""`python -m stratagem.coordinator`."""

from stratagem.coordinator.main import main

main()

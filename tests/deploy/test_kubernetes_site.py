"""deploy/kubernetes/site: the worker of a site in a cluster of its own, which nobody dials."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import yaml

from stratagem.worker.process.main import STOP_GRACE_S
from stratagem.worker.process.settings import WorkerSettings, from_command_line
from tests.deploy.compose import VERSION
from tests.deploy.overlays import (
    FOLDER,
    Object,
    check_fields,
    check_restricted,
    kustomized,
    named,
    of_kind,
)
from tests.repository import ROOT

pytestmark = pytest.mark.core

PAGE = (ROOT / "docs" / "how-to" / "tunnel.md").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.site.yml").read_text())
NAME = "stratagem-site"


@pytest.fixture(scope="module", name="objects")
def _objects(tmp_path_factory: pytest.TempPathFactory) -> tuple[Object, ...]:
    """What the kustomization makes that the documentation shows."""
    (text,) = re.findall(r'```yaml title="mysite/kustomization.yaml"\n(.*?)```', PAGE, re.DOTALL)
    folder = tmp_path_factory.mktemp("mysite")
    relative = os.path.relpath(FOLDER / "site", folder)
    assert "../deploy/kubernetes/site" in text
    (folder / "kustomization.yaml").write_text(text.replace("../deploy/kubernetes/site", relative))
    for generator in ("configMapGenerator", "secretGenerator"):
        for each in yaml.safe_load(text)[generator]:
            for file in each.get("files", ()):
                (folder / file).write_text(f"{file}\n")
    return kustomized(folder)


def pod(objects: tuple[Object, ...]) -> Object:
    spec: Object = named(objects, "StatefulSet", NAME)["spec"]["template"]["spec"]
    return spec


def told(objects: tuple[Object, ...], monkeypatch: pytest.MonkeyPatch) -> WorkerSettings:
    (container,) = pod(objects)["containers"]
    (source,) = container["envFrom"]
    for name, value in named(objects, "ConfigMap", source["configMapRef"]["name"])["data"].items():
        monkeypatch.setenv(name, value)
    return from_command_line(container["args"])


def test_it_dials_out_and_nobody_dials_it(
    objects: tuple[Object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = told(objects, monkeypatch)
    assert settings.tunnel
    assert settings.coordinator == "coordinator.example.org:7070"
    assert settings.name == "st-anna"
    assert settings.listen.startswith("127.0.0.1:"), "where the health port is, too"
    assert not settings.allow_insecure_network
    policies = {
        each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "NetworkPolicy")
    }
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert not any(policy.get("ingress") for policy in policies.values())
    (out,) = policies["coordinator"]["egress"]
    assert [port["port"] for port in out["ports"]] == [7070]
    assert named(objects, "Service", NAME)["spec"].get("ports") is None


def test_it_is_told_what_the_worker_on_one_machine_is(
    objects: tuple[Object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = told(objects, monkeypatch)
    twin = [each for each in COMPOSE["services"]["worker"]["command"] if "${" not in each]
    other = from_command_line(
        ["--coordinator=coordinator.example.org:7070", "--name=st-anna", *twin]
    )
    same = ("data_dir", "health_port", "site", "import_path", "tls_ca", "tls_cert", "tls_key")
    for key in (*same, "drain_grace_s", "listen", "tunnel"):
        assert getattr(settings, key) == getattr(other, key), key
    seconds = pod(objects)["terminationGracePeriodSeconds"]
    assert seconds > settings.drain_grace_s + STOP_GRACE_S


def test_its_pod_may_do_as_little_as_those_of_a_cluster(objects: tuple[Object, ...]) -> None:
    check_restricted(objects)
    (container,) = pod(objects)["containers"]
    assert container["image"].endswith(f":{VERSION}")
    assert "memory" in container["resources"]["limits"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"][-1] == "127.0.0.1:7071"


def test_what_it_reads_and_keeps_is_mounted(
    objects: tuple[Object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, settings = pod(objects), told(objects, monkeypatch)
    (container,) = spec["containers"]
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    (kept,) = named(objects, "StatefulSet", NAME)["spec"]["volumeClaimTemplates"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert mounts.keys() == volumes.keys() | {kept["metadata"]["name"]}
    assert mounts["kept"]["mountPath"] == str(settings.data_dir)
    assert {name for name, each in mounts.items() if not each.get("readOnly")} == {"kept", "tmp"}
    files = named(objects, "ConfigMap", volumes["site"]["configMap"]["name"])["data"]
    assert settings.site is not None
    assert settings.site.name in files
    keys = named(objects, "Secret", volumes["tls"]["secret"]["secretName"])["data"]
    assert keys.keys() == {
        file.name for file in (settings.tls_ca, settings.tls_cert, settings.tls_key) if file
    }
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] in PAGE


def test_the_schemas_of_kubernetes_know_every_field(objects: tuple[Object, ...]) -> None:
    check_fields(*objects)

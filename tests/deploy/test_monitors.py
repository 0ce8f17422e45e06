"""What the Prometheus Operator and KEDA are given: their schemas know every field, and each
selector selects.

The schemas are those of its custom resource definitions (crds/), with unknown fields forbidden, as
the API server would only drop them. Rules in CEL are not among them.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from stratagem.client.launch.kubernetes import MAX_PER_POD
from stratagem.common.identity.certificates import init, show
from stratagem.common.identity.tls import DEFAULT_TRUST_DOMAIN, worker_name
from stratagem.coordinator.process.metrics import METRICS
from tests.deploy.launches import launched_pod
from tests.deploy.overlays import (
    MONITORED,
    SECURE,
    Object,
    component,
    coordinator,
    is_selected,
    named,
    of_kind,
    ports_of,
    rendered,
    selected,
    templates,
    worker,
)
from tests.repository import ROOT

pytestmark = pytest.mark.core

CRDS = Path(__file__).parent / "crds"
KINDS = {"PodMonitor": "podMetricsEndpoints", "ServiceMonitor": "endpoints"}
each_kind = pytest.mark.parametrize("kind", KINDS)


def strict(schema: Any) -> Any:
    """The same schema, without fields that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made


@each_kind
def test_the_operator_s_schemas_know_every_field(kind: str) -> None:
    for overlay in (MONITORED, SECURE):
        found = of_kind(rendered(overlay), kind)
        assert len(found) == 2
        for each in found:
            wrong = copy.deepcopy(each)
            wrong["spec"][KINDS[kind]][0]["portt"] = "metrics"
            check_schema(each, wrong, "portt")


def check_schema(right: Object, wrong: Object, unknown: str) -> None:
    schema = json.loads((CRDS / f"{right['kind'].lower()}s.json").read_text())
    validator = Draft202012Validator(strict(schema))
    validator.validate(right)
    with pytest.raises(ValidationError, match=f"'{unknown}' was unexpected"):
        validator.validate(wrong)


@each_kind
def test_each_process_is_scraped_once_at_the_port_of_its_metrics(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = rendered(MONITORED)
    scraped = []
    for monitor in of_kind(objects, kind):
        (endpoint,) = monitor["spec"][KINDS[kind]]
        for pod in meant(objects, monitor):
            scraped.append(component(pod))
            assert ports_that(endpoint, pod) == ["metrics"]
            assert ports_of(pod)["metrics"] == coordinator(objects).metrics_port
    assert sorted(scraped) == ["coordinator", "worker"]
    assert worker(objects, monkeypatch).metrics_deployment == "ns"


def ports_that(endpoint: Object, pod: Object) -> list[str]:
    """The ports of a pod that an endpoint means: that of a name, or, without one, all that its
    rules keep, which is what the operator makes of them."""
    rules = endpoint.get("relabelings", [])
    if "port" in endpoint:
        assert rules == []
        return [name for name in ports_of(pod) if name == endpoint["port"]]
    (rule,) = rules
    assert rule["action"] == "keep"
    assert rule["sourceLabels"] == ["__meta_kubernetes_pod_container_port_name"]
    return [name for name in ports_of(pod) if re.fullmatch(rule["regex"], name)]


@pytest.mark.parametrize("per_pod", [1, 3, MAX_PER_POD])
def test_launched_workers_are_scraped_by_the_rule_of_the_standing_ones(per_pod: int) -> None:
    objects, pod = rendered(MONITORED), launched_pod(per_pod)
    labels = pod["metadata"]["labels"]
    found = of_kind(objects, "PodMonitor")
    (means,) = [each for each in found if is_selected(labels, each["spec"]["selector"])]
    assert means["metadata"]["name"] == "stratagem-worker"
    (endpoint,) = means["spec"]["podMetricsEndpoints"]
    ports = [ports_of(pod)[name] for name in ports_that(endpoint, pod)]
    settings = [argument for each in pod["spec"]["containers"] for argument in each["args"]]
    assert [f"--metrics-port={port}" for port in ports] == [
        each for each in settings if each.startswith("--metrics-port")
    ]
    assert len(ports) == per_pod
    (rule,) = named(objects, "NetworkPolicy", "stratagem-metrics")["spec"]["ingress"]
    (opened,) = rule["ports"]
    assert set(ports) <= set(range(opened["port"], opened["endPort"] + 1))


def of_workers(overlay: str) -> Object:
    """How the PodMonitor of workers asks them."""
    monitor = named(rendered(overlay), "PodMonitor", "stratagem-worker")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    found: Object = endpoint
    return found


def test_without_the_operator_pods_are_found_by_the_same_rule() -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    jobs = [job for each in blocks for job in each.get("scrape_configs", [])]
    (told,) = [job for job in jobs if "kubernetes_sd_configs" in job]
    (rule,) = of_workers(MONITORED)["relabelings"]
    ported = [each for each in told["relabel_configs"] if each.get("regex") == rule["regex"]]
    assert [each["source_labels"] for each in ported] == [rule["sourceLabels"]]


def test_annotations_of_launched_pods_are_those_of_standing_ones_and_hide_no_worker() -> None:
    for overlay, changes in ((MONITORED, {}), (SECURE, {"secret": "s", "pool": "gpu"})):
        pods = templates(rendered(overlay))
        (standing,) = [each for each in pods if component(each) == "worker"]
        launched = launched_pod(1, **changes)
        assert launched["metadata"]["annotations"] == standing["metadata"]["annotations"]
    for pod in (launched_pod(2), launched_pod(1, metrics=False)):
        assert "annotations" not in pod["metadata"]
    assert "metrics-0" not in ports_of(launched_pod(1, metrics=False))


def test_under_tls_the_certificate_of_a_pool_has_the_name_that_is_expected(tmp_path: Path) -> None:
    init(tmp_path, workers=[], clients=[], hosts=["head"], pools=["gpu"])
    pools, *_ = show(tmp_path / "pool-gpu.crt")
    assert of_workers(SECURE)["tlsConfig"]["serverName"] in pools.hosts


def meant(objects: tuple[Object, ...], monitor: Object) -> list[Object]:
    """The pods that a monitor means, by way of a Service or not."""
    wanted = monitor["spec"]["selector"]
    if monitor["kind"] == "PodMonitor":
        return selected(objects, wanted)
    return [
        pod
        for each in of_kind(objects, "Service")
        if wanted["matchLabels"].items() <= each["metadata"].get("labels", {}).items()
        if [port["name"] for port in each["spec"]["ports"]] == ["metrics"]
        for pod in selected(objects, {"matchLabels": each["spec"]["selector"]})
    ]


@each_kind
def test_under_tls_the_operator_knows_whom_to_expect(kind: str) -> None:
    objects = rendered(SECURE)
    service = named(objects, "Service", "stratagem-coordinator")["metadata"]["name"]
    names = {"coordinator": service, "worker": worker_name(DEFAULT_TRUST_DOMAIN)}
    volumes = [volume for pod in templates(objects) for volume in pod["spec"]["volumes"]]
    secrets = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    for monitor in of_kind(objects, kind):
        (endpoint,) = monitor["spec"][KINDS[kind]]
        (pod,) = meant(objects, monitor)
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["serverName"] == names[component(pod)]
        assert endpoint["tlsConfig"]["ca"]["secret"]["name"] in secrets


def test_keda_scales_the_workers_by_a_metric_that_there_is() -> None:
    objects = rendered("cpu+metrics+keda")
    (found,) = of_kind(objects, "ScaledObject")
    wrong = copy.deepcopy(found)
    wrong["spec"]["maxReplicas"] = 3
    check_schema(found, wrong, "maxReplicas")
    target = found["spec"]["scaleTargetRef"]
    scaled = named(objects, target["kind"], target["name"])
    assert "replicas" not in scaled["spec"], "a number that is applied again takes KEDA's back"
    (trigger,) = found["spec"]["triggers"]
    query, names = trigger["metadata"]["query"], {metric.name for metric in METRICS}
    assert set(re.findall(r"stratagem_\w+", query)) <= names
    assert f'deployment="{found["metadata"]["namespace"]}"' in query

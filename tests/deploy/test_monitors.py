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

from stratagem.client.launch.kubernetes_pod import MAX_PER_POD
from stratagem.common.identity.certificates import init, show
from stratagem.common.identity.tls_files import DEFAULT_TRUST_DOMAIN, worker_name
from stratagem.coordinator.process.coordinator_metrics import METRICS
from tests.deploy.launches import launched_pod
from tests.deploy.overlays import (
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
KINDS = {
    "PodMonitor": ("pod-monitor", "podMetricsEndpoints"),
    "ServiceMonitor": ("service-monitor", "endpoints"),
}
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


def schema_of(kind: str) -> Draft202012Validator:
    schema = json.loads((CRDS / f"{kind.lower()}s.json").read_text())
    return Draft202012Validator(strict(schema))


def monitors(kind: str, *more: str) -> tuple[tuple[Object, ...], list[Object]]:
    objects = rendered("+".join(("cpu", "metrics", KINDS[kind][0], *more)))
    return objects, of_kind(objects, kind)


@each_kind
@pytest.mark.parametrize("more", [(), ("tls",)])
def test_the_operator_s_schemas_know_every_field(kind: str, more: tuple[str, ...]) -> None:
    schema = schema_of(kind)
    _, found = monitors(kind, *more)
    assert len(found) == 2
    for each in found:
        schema.validate(each)
        wrong = copy.deepcopy(each)
        wrong["spec"][KINDS[kind][1]][0]["portt"] = "metrics"
        with pytest.raises(ValidationError, match="'portt' was unexpected"):
            schema.validate(wrong)


@each_kind
def test_each_process_is_scraped_once_at_the_port_of_its_metrics(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, found = monitors(kind)
    scraped = []
    for monitor in found:
        (endpoint,) = monitor["spec"][KINDS[kind][1]]
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
    objects, found = monitors("PodMonitor")
    pod = launched_pod(per_pod)
    means = [each for each in found if is_selected(pod["metadata"]["labels"], selector(each))]
    assert [each["metadata"]["name"] for each in means] == ["stratagem-worker"]
    (endpoint,) = means[0]["spec"]["podMetricsEndpoints"]
    ports = [ports_of(pod)[name] for name in ports_that(endpoint, pod)]
    settings = [argument for each in pod["spec"]["containers"] for argument in each["args"]]
    assert [f"--metrics-port={port}" for port in ports] == [
        each for each in settings if each.startswith("--metrics-port")
    ]
    assert len(ports) == per_pod
    (rule,) = named(objects, "NetworkPolicy", "stratagem-metrics")["spec"]["ingress"]
    (opened,) = rule["ports"]
    assert set(ports) <= set(range(opened["port"], opened["endPort"] + 1))


def test_without_the_operator_pods_are_found_by_the_same_rule() -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    (told,) = [job for each in blocks for job in each.get("scrape_configs", []) if is_of_pods(job)]
    _, found = monitors("PodMonitor")
    (endpoint,) = named(tuple(found), "PodMonitor", "stratagem-worker")["spec"][
        "podMetricsEndpoints"
    ]
    (rule,) = endpoint["relabelings"]
    ported = [each for each in told["relabel_configs"] if each.get("regex") == rule["regex"]]
    assert [each["source_labels"] for each in ported] == [rule["sourceLabels"]]


def is_of_pods(job: Object) -> bool:
    return "kubernetes_sd_configs" in job


def test_annotations_of_launched_pods_are_those_of_standing_ones_and_hide_no_worker() -> None:
    (standing,) = [each for each in templates(rendered("cpu+metrics")) if is_worker(each)]
    assert launched_pod(1)["metadata"]["annotations"] == standing["metadata"]["annotations"]
    (standing,) = [each for each in templates(rendered("cpu+metrics+tls")) if is_worker(each)]
    annotated = launched_pod(1, secret="s", pool="gpu")["metadata"]["annotations"]
    assert annotated == standing["metadata"]["annotations"]
    for pod in (launched_pod(2), launched_pod(1, metrics=False)):
        assert "annotations" not in pod["metadata"]
    assert "metrics-0" not in ports_of(launched_pod(1, metrics=False))


def test_under_tls_the_certificate_of_a_pool_has_the_name_that_is_expected(tmp_path: Path) -> None:
    _, found = monitors("PodMonitor", "tls")
    (monitor,) = [each for each in found if each["metadata"]["name"] == "stratagem-worker"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    init(tmp_path, workers=[], clients=[], hosts=["head"], pools=["gpu"])
    pools, *_ = show(tmp_path / "pool-gpu.crt")
    assert endpoint["tlsConfig"]["serverName"] in pools.hosts


def is_worker(pod: Object) -> bool:
    return component(pod) == "worker"


def selector(monitor: Object) -> Object:
    found: Object = monitor["spec"]["selector"]
    return found


def meant(objects: tuple[Object, ...], monitor: Object) -> list[Object]:
    """The pods that a monitor means, by way of a Service or not."""
    wanted = selector(monitor)
    if monitor["kind"] == "PodMonitor":
        return selected(objects, wanted)
    services = [
        each
        for each in of_kind(objects, "Service")
        if wanted["matchLabels"].items() <= each["metadata"].get("labels", {}).items()
    ]
    return [
        pod
        for each in services
        if [port["name"] for port in each["spec"]["ports"]] == ["metrics"]
        for pod in selected(objects, {"matchLabels": each["spec"]["selector"]})
    ]


@each_kind
def test_under_tls_the_operator_knows_whom_to_expect(kind: str) -> None:
    objects, found = monitors(kind, "tls")
    service = named(objects, "Service", "stratagem-coordinator")["metadata"]["name"]
    names = {"coordinator": service, "worker": worker_name(DEFAULT_TRUST_DOMAIN)}
    secrets = {
        volume["secret"]["secretName"]
        for pod in templates(objects)
        for volume in pod["spec"]["volumes"]
        if "secret" in volume
    }
    for monitor in found:
        (endpoint,) = monitor["spec"][KINDS[kind][1]]
        (pod,) = meant(objects, monitor)
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["serverName"] == names[component(pod)]
        assert endpoint["tlsConfig"]["ca"]["secret"]["name"] in secrets


def test_keda_scales_the_workers_by_a_metric_that_there_is() -> None:
    objects = rendered("cpu+metrics+keda")
    (found,) = of_kind(objects, "ScaledObject")
    schema = schema_of("ScaledObject")
    schema.validate(found)
    wrong = copy.deepcopy(found)
    wrong["spec"]["maxReplicas"] = 3
    with pytest.raises(ValidationError, match="'maxReplicas' was unexpected"):
        schema.validate(wrong)
    target = found["spec"]["scaleTargetRef"]
    scaled = named(objects, target["kind"], target["name"])
    assert "replicas" not in scaled["spec"], "a number that is applied again takes KEDA's back"
    (trigger,) = found["spec"]["triggers"]
    names = {metric.name for metric in METRICS}
    assert set(re.findall(r"stratagem_\w+", trigger["metadata"]["query"])) <= names
    namespace = found["metadata"]["namespace"]
    assert f'deployment="{namespace}"' in trigger["metadata"]["query"]

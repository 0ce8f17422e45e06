"""The Kubernetes overlays, as kubectl renders them: what their objects say of each other is true.

The schemas know whether a field exists (`make kubernetes-test`), but not whether a selector selects
anything or a probe asks a port that is open. The arguments are read by our own processes' parsers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from stratagem.client.launch.kubernetes import MAX_PER_POD
from stratagem.coordinator.process.main import STOP_GRACE_S as COORDINATOR_STOP_GRACE_S
from stratagem.coordinator.runtime.leader_gate import LIVE
from stratagem.coordinator.store.bucket import check_url
from stratagem.coordinator.store.database import SCHEME
from stratagem.worker.process.main import STOP_GRACE_S as WORKER_STOP_GRACE_S
from tests.deploy.compose import VERSION
from tests.deploy.overlays import (
    MONITORED,
    POD,
    SECURE,
    Object,
    check_fields,
    check_restricted,
    component,
    containers,
    coordinator,
    named,
    of_kind,
    ports_of,
    rendered,
    selected,
    templates,
    worker,
)

pytestmark = pytest.mark.core

OVERLAYS = ["cpu", "gpu", "cpu+postgres-ha", "cpu+s3", "cpu+metrics+keda", MONITORED, SECURE]


@pytest.fixture(params=OVERLAYS, name="objects")
def _objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return rendered(request.param)


def peers(policy: Object) -> Iterator[tuple[Object, Object]]:
    """Each rule of a policy with each peer that it lets through."""
    for rule in policy["spec"].get("ingress", []):
        yield from ((rule, peer) for peer in rule["from"])
    for rule in policy["spec"].get("egress", []):
        yield from ((rule, peer) for peer in rule.get("to", []))


# ---- who means whom ----


def test_sets_services_and_probes_mean_pods_and_their_ports(
    objects: tuple[Object, ...],
) -> None:
    for each in of_kind(objects, "StatefulSet"):
        assert selected(objects, each["spec"]["selector"]) == [each["spec"]["template"]]
        service = named(objects, "Service", each["spec"]["serviceName"])
        assert service["spec"]["selector"] == each["spec"]["selector"]["matchLabels"]
    for service in of_kind(objects, "Service"):
        (pod,) = selected(objects, {"matchLabels": service["spec"]["selector"]})
        for port in service["spec"]["ports"]:
            assert ports_of(pod)[port["targetPort"]] == port["port"]
    for pod in templates(objects):
        for container in pod["spec"]["containers"]:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = container[probe]["grpc"]
                assert asked["port"] == ports_of(pod)["health"]
                # Who stands by, or reads a long journal, is well, and not ready.
                may_wait = component(pod) == "coordinator" and probe != "readinessProbe"
                assert asked.get("service", "") == (LIVE if may_wait else "")


def is_pair(objects: tuple[Object, ...]) -> bool:
    """With the component postgres-ha."""
    replicas = named(objects, "StatefulSet", "stratagem-coordinator")["spec"]["replicas"]
    assert replicas in (1, 2)
    return bool(replicas == 2)


def test_policies_mean_what_is_there_and_let_nothing_else_in(
    objects: tuple[Object, ...],
) -> None:
    for each in of_kind(objects, "PodDisruptionBudget"):
        assert selected(objects, each["spec"]["selector"])
    deny = named(objects, "NetworkPolicy", "deny-all")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    allowed: set[tuple[str, str, str]] = set()
    for policy in of_kind(objects, "NetworkPolicy"):
        targets = selected(objects, policy["spec"]["podSelector"])
        assert targets
        for rule, peer in peers(policy):
            others = selected(objects, peer["podSelector"]) if "podSelector" in peer else []
            assert others or "namespaceSelector" in peer
            comes_in = rule in policy["spec"].get("ingress", [])
            for port in rule.get("ports", []):
                receivers = targets if comes_in else others
                assert all(port["port"] in ports_of(pod).values() for pod in receivers)
            direction = "ingress" if comes_in else "egress"
            allowed |= {(component(a), direction, component(b)) for a in targets for b in others}
    talk = {("coordinator", "worker"), ("worker", "coordinator"), ("worker", "worker")}
    assert allowed == {(b, "ingress", a) for a, b in talk} | {(a, "egress", b) for a, b in talk}


def test_references_lead_somewhere(objects: tuple[Object, ...]) -> None:
    for each in of_kind(objects, "StatefulSet"):
        spec = each["spec"]["template"]["spec"]
        named(objects, "ServiceAccount", spec["serviceAccountName"])
        volumes = {volume["name"] for volume in spec["volumes"]}
        volumes |= {c["metadata"]["name"] for c in each["spec"].get("volumeClaimTemplates", [])}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            for source in container.get("envFrom", []):
                named(objects, "ConfigMap", source["configMapRef"]["name"])
            for item in container.get("env", []):
                resource = item["valueFrom"].get("resourceFieldRef")
                assert resource is None or resource["containerName"] == container["name"]
    assert not of_kind(objects, "Secret")


# ---- what pods may do ----


def test_pods_fit_the_restricted_standard_and_say_their_needs(
    objects: tuple[Object, ...],
) -> None:
    check_restricted(objects)
    for pod in templates(objects):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        assert {key for v in spec["volumes"] for key in v} <= {"name", "emptyDir", "secret"}
        for container in spec["containers"]:
            assert not any("hostPort" in port for port in container["ports"])
            assert container["image"].endswith(f":{VERSION}")
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]
            assert "cpu" not in container["resources"]["limits"]


# ---- what our processes are told ----


def test_processes_are_told_what_the_objects_say(
    objects: tuple[Object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = worker(objects, monkeypatch)
    (pod,) = [each for each in templates(objects) if component(each) == "worker"]
    service = named(objects, "Service", "stratagem-worker")
    assert service["spec"]["clusterIP"] == "None"
    assert told.name == POD["POD_NAME"]
    assert told.advertise == f"{told.name}.{service['metadata']['name']}.ns.svc"
    assert told.listen == f"0.0.0.0:{ports_of(pod)['grpc']}"
    assert told.health_port == ports_of(pod)["health"]
    assert told.threads == 2
    assert (told.allow, told.import_path) == (["examples.*:*"], ["/srv/code"])
    pods = [f"stratagem-coordinator-{n}.stratagem-coordinators" for n in range(2)]
    hosts = pods if is_pair(objects) else ["stratagem-coordinator"]
    front = named(objects, "Service", hosts[0].partition(".")[2] or hosts[0])
    port = front["spec"]["ports"][0]["port"]
    assert told.coordinator == ",".join(f"{host}:{port}" for host in hosts)
    needed_s = told.drain_grace_s + WORKER_STOP_GRACE_S
    assert pod["spec"]["terminationGracePeriodSeconds"] > needed_s
    own = coordinator(objects)
    each = named(objects, "StatefulSet", "stratagem-coordinator")["spec"]
    pod = each["template"]
    assert own.listen == f"0.0.0.0:{ports_of(pod)['grpc']}"
    assert own.health_port == ports_of(pod)["health"]
    mounts = {m["name"]: m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounts[each["volumeClaimTemplates"][0]["metadata"]["name"]] == str(own.data_dir)
    assert pod["spec"]["terminationGracePeriodSeconds"] > 2 * COORDINATOR_STOP_GRACE_S


def test_gpu_workers_have_one_gpu_and_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = rendered("gpu")
    assert worker(objects, monkeypatch).device == "cuda:0"
    (container,) = [each for each in containers(objects) if each["name"] == "worker"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"].startswith("stratagem-worker-gpu:")
    assert worker(rendered("cpu"), monkeypatch).device == "cpu"


def test_metrics_are_scraped_where_they_are_served_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects = rendered(MONITORED)
    for pod in templates(objects):
        port = ports_of(pod)["metrics"]
        annotations = {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(port),
            "prometheus.io/path": "/metrics",
        }
        assert pod["metadata"]["annotations"] == annotations
        assert coordinator(objects).metrics_port == port
        assert worker(objects, monkeypatch).metrics_port == port
        (rule,) = named(objects, "NetworkPolicy", "stratagem-metrics")["spec"]["ingress"]
        assert rule["ports"] == [{"port": port, "endPort": port + MAX_PER_POD - 1}]
        assert all("namespaceSelector" in peer for peer in rule["from"])
    assert coordinator(rendered("cpu")).metrics_port is None
    for pod in templates(rendered(SECURE)):  # the processes' certificates serve them, too
        assert pod["metadata"]["annotations"] == annotations | {"prometheus.io/scheme": "https"}


def secret_file(overlay: str, name: str) -> tuple[tuple[Object, ...], Object, str]:
    """Objects, the coordinator's container, and where it alone has a secret mounted."""
    objects = rendered(overlay)
    mounted = {component(pod): pod["spec"] for pod in templates(objects)}
    assert [v for v in mounted["worker"]["volumes"] if "secret" in v] == []
    (volume,) = [v for v in mounted["coordinator"]["volumes"] if "secret" in v]
    assert volume["secret"] == {"secretName": name, "defaultMode": 0o440}
    (container,) = mounted["coordinator"]["containers"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
    return objects, container, str(mount["mountPath"])


def test_the_keys_of_the_object_store_are_a_file_that_only_the_coordinator_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects, container, folder = secret_file("cpu+s3", "stratagem-s3")
    (source,) = container["envFrom"]
    environ = named(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    assert environ["AWS_SHARED_CREDENTIALS_FILE"] == f"{folder}/credentials"
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    check_url(coordinator(objects).blob_store)
    (rule,) = named(objects, "NetworkPolicy", "stratagem-s3")["spec"]["egress"]
    assert rule == {"ports": [{"protocol": "TCP", "port": 443}]}


def test_of_a_pair_of_coordinators_each_has_a_name_and_nobody_waits_for_the_standby() -> None:
    objects = rendered("cpu+postgres-ha")
    each = named(objects, "StatefulSet", "stratagem-coordinator")["spec"]
    assert each["replicas"] == 2
    assert each["podManagementPolicy"] == "Parallel"
    assert each["updateStrategy"] == {"type": "OnDelete"}
    service = named(objects, "Service", each["serviceName"])["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert coordinator(objects).advertise == f"$(POD_NAME).{each['serviceName']}:7070"
    for budget in of_kind(objects, "PodDisruptionBudget"):
        held_up = {component(pod) for pod in selected(objects, budget["spec"]["selector"])}
        assert "coordinator" not in held_up


def test_the_password_of_the_journal_is_a_file_that_only_the_coordinators_see() -> None:
    objects, container, folder = secret_file("cpu+postgres-ha", "stratagem-journal")
    assert str(coordinator(objects).journal_password_file) == f"{folder}/password"
    (source,) = [e for e in container["env"] if e["name"] == "STRATAGEM_COORDINATOR_JOURNAL"]
    key = source["valueFrom"]["configMapKeyRef"]
    url = make_url(named(objects, "ConfigMap", key["name"])["data"][key["key"]])
    assert (url.drivername, url.password) == (SCHEME, None)
    (rule,) = named(objects, "NetworkPolicy", "stratagem-journal")["spec"]["egress"]
    assert rule == {"ports": [{"protocol": "TCP", "port": url.port}]}


def test_with_certificates_only_probes_are_in_plaintext(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a worker sees its own key alone, under the name that `stratagem certs init` gives it."""
    objects = rendered(SECURE)
    told, own = worker(objects, monkeypatch), coordinator(objects)
    assert not told.allow_insecure_network
    assert not own.allow_insecure_network
    pods = {component(pod): pod for pod in templates(objects)}
    assert own.token_listen == f"0.0.0.0:{ports_of(pods['coordinator'])['tokens']}"
    for pod, files in (
        (pods["worker"], (told.tls_ca, told.tls_cert, told.tls_key)),
        (pods["coordinator"], (own.tls_ca, own.tls_cert, own.tls_key, own.tokens_file)),
    ):
        mounts = pod["spec"]["containers"][0]["volumeMounts"]
        read_only = [Path(mount["mountPath"]) for mount in mounts if mount.get("readOnly")]
        for file in files:
            assert file is not None
            assert {file, file.parent} & set(read_only)
        for volume in pod["spec"]["volumes"]:
            assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440
    (container,) = pods["worker"]["spec"]["containers"]
    mounts = [each for each in container["volumeMounts"] if each["name"] == "tls"]
    sources = [each.get("subPath") or each["subPathExpr"] for each in mounts]
    filled = [re.sub(r"\$\((\w+)\)", lambda m: POD[m[1]], each) for each in sources]
    name = POD["POD_NAME"]
    assert filled == ["ca.crt", f"worker-{name}.crt", f"worker-{name}.key"]


def test_the_schemas_of_kubernetes_know_every_field(objects: tuple[Object, ...]) -> None:
    check_fields(*objects)

"""What `stratagem launch kubernetes` hands to kubectl: Kubernetes knows it, the policies of the
deployment let it through, and a worker takes its arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stratagem.client.launch.kubernetes import (
    GRACE_S,
    MAX_PER_POD,
    Object,
    PodShape,
    as_text,
    kubernetes_job,
    submit,
)
from stratagem.client.launch.workers import WorkerLaunch
from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.worker.process.main import STOP_GRACE_S
from stratagem.worker.process.settings import from_command_line
from tests.client.cli.command_line import invoke
from tests.deploy.compose import VERSION
from tests.deploy.launches import INSECURE, launched, launched_pod, shape, template
from tests.deploy.overlays import check_fields, is_selected, of_kind, ports_of, rendered
from tests.jobs import document

pytestmark = pytest.mark.core

POD = {"POD_NAME": "digits-0-x7k2p", "POD_IP": "10.1.2.3"}
POD |= {"STRATAGEM_WORKER_METRICS_DEPLOYMENT": "stratagem"}


WITH_ALL = {"per_pod": 2, "gpus": 1, "queue": "team", "secret": "workers-tls", "pool": "gpu"}
WITH_ALL |= {"node_labels": ("example.com/gpu=a100", "fast="), "job_name": "digits-a100"}
SHAPES = [
    pytest.param(launched(5, INSECURE), shape(), id="plain"),
    pytest.param(launched(4), shape(**WITH_ALL), id="all"),
    pytest.param(launched(1, INSECURE), shape(queue="team"), id="one"),
]


@pytest.mark.parametrize(("launch", "of"), SHAPES)
def test_kubernetes_knows_every_field(launch: WorkerLaunch, of: PodShape) -> None:
    check_fields(kubernetes_job(launch, of))


@pytest.mark.parametrize(("launch", "of"), SHAPES)
def test_the_text_says_what_the_object_does(launch: WorkerLaunch, of: PodShape) -> None:
    made = kubernetes_job(launch, of)
    text = as_text(made, launch)
    assert yaml.safe_load(text) == made
    assert "&" not in text


@pytest.mark.parametrize(("launch", "of"), SHAPES)
def test_a_worker_takes_its_arguments(
    launch: WorkerLaunch, of: PodShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = template(kubernetes_job(launch, of))["spec"]
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    settings = []
    for container in pod["containers"]:
        assert container["command"] == ["python", "-m", "stratagem.worker"]
        for item in container["env"]:
            told = item["valueFrom"].get("resourceFieldRef")
            assert told is None or told["containerName"] == container["name"]
            requested = container["resources"]["requests"]["cpu"]
            monkeypatch.setenv(item["name"], POD.get(item["name"], requested))
        words = [re.sub(r"\$\((\w+)\)", lambda m: POD[m[1]], each) for each in container["args"]]
        settings.append(from_command_line(words))
    assert len({each.name for each in settings}) == of.per_pod
    assert settings[0].name == POD["POD_NAME"]
    assert [each.threads for each in settings] == [of.cpus] * of.per_pod
    assert all(each.for_run == "digits" and each.ephemeral for each in settings)
    ports = [port["containerPort"] for each in pod["containers"] for port in each["ports"]]
    assert len(set(ports)) == len(ports)
    for each, container in zip(settings, pod["containers"], strict=True):
        opened = [port["containerPort"] for port in container["ports"]]
        served = [int(each.listen.rpartition(":")[2]), each.health_port, each.metrics_port]
        assert opened == served
        assert each.metrics_deployment == POD["STRATAGEM_WORKER_METRICS_DEPLOYMENT"]
        assert container["startupProbe"]["grpc"]["port"] == each.health_port
    asked = {str(each.health_port) for each in settings}
    for container in pod["containers"]:
        assert asked == {port for _, port in alive_at(container)}


def alive_at(container: Object) -> list[tuple[str, str]]:
    """The host and port of each service that the probe asks which keeps a container alive."""
    probe = container["livenessProbe"]
    if "grpc" in probe:
        return [("", str(probe["grpc"]["port"]))]
    program, *addresses = " ".join(probe["exec"]["command"]).split(" $POD_IP:")
    assert program == "python -m stratagem.common.health"
    assert "POD_IP" in {item["name"] for item in container["env"]}
    return [("$POD_IP", port) for port in addresses]


@pytest.mark.parametrize(
    ("statuses", "disrupted", "action"),
    [
        ((75, 75), False, "Ignore"),  # preempted
        ((137, 75), True, "Ignore"),  # its node drained, and one worker was too slow
        ((1, 75), False, "Count"),  # one has failed, and the other left because of it
        ((0, 137), False, "Count"),
        ((0, 75), False, "Ignore"),
    ],
)
def test_only_who_fails_counts(statuses: tuple[int, ...], disrupted: bool, action: str) -> None:
    """By the rules as Kubernetes reads them: the first that fits, and a status of 0 fits none."""
    made = kubernetes_job(launched(2, INSECURE), shape(per_pod=2))

    def fits(rule: Object) -> bool:
        if "onPodConditions" in rule:
            return disrupted
        codes, is_in = rule["onExitCodes"]["values"], rule["onExitCodes"]["operator"] == "In"
        return any((status in codes) is is_in for status in statuses if status)

    rules = made["spec"]["podFailurePolicy"]["rules"]
    assert next((rule["action"] for rule in rules if fits(rule)), "Count") == action


def test_a_run_has_a_job_for_each_kind_of_nodes_whose_pods_end_before_they_are_killed() -> None:
    first, second = (
        kubernetes_job(launched(2, INSECURE), shape(**changed))
        for changed in ({}, {"node_labels": ("example.com/gpu=a100", "fast="), "job_name": "x"})
    )
    assert [each["metadata"]["name"] for each in (first, second)] == ["digits", "x"]
    assert first["metadata"]["labels"] == second["metadata"]["labels"]
    assert "nodeSelector" not in template(first)["spec"]
    pod = template(second)["spec"]
    assert pod["nodeSelector"] == {"example.com/gpu": "a100", "fast": ""}
    (drains,) = [each for each in pod["containers"][0]["args"] if "drain" in each]
    assert float(drains.partition("=")[2]) + STOP_GRACE_S <= GRACE_S
    assert pod["terminationGracePeriodSeconds"] == GRACE_S


def test_the_policies_of_workers_mean_launched_ones_and_the_rest_does_not() -> None:
    pod, objects = launched_pod(MAX_PER_POD), rendered("cpu")
    labels, policies = pod["metadata"]["labels"], of_kind(objects, "NetworkPolicy")
    named = [
        each["metadata"]["name"]
        for each in policies
        if is_selected(labels, each["spec"]["podSelector"])
    ]
    assert sorted(named) == ["deny-all", "dns", "stratagem-worker"]
    for each in of_kind(objects, "StatefulSet", "PodDisruptionBudget"):
        assert not is_selected(labels, each["spec"]["selector"])
    for each in of_kind(objects, "Service"):
        assert not is_selected(labels, {"matchLabels": each["spec"]["selector"]})
    served = {port for name, port in ports_of(pod).items() if name.startswith("grpc")}
    for policy in policies:
        for rule in policy["spec"].get("egress", []) + policy["spec"].get("ingress", []):
            for port in rule.get("ports", []):
                if port["port"] == 7072:
                    assert served == set(range(port["port"], port["endPort"] + 1))


def test_a_job_of_one_pod_asks_kueue_for_no_smaller_one() -> None:
    (alone, several) = (
        kubernetes_job(launched(number, INSECURE), shape(queue="team")) for number in (1, 2)
    )
    assert "annotations" not in alone["metadata"]
    assert several["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "1"
    for each in (alone, several):
        assert each["spec"]["suspend"] is True
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "suspend" not in kubernetes_job(launched(2, INSECURE), shape())["spec"]


def test_a_secret_has_any_name_that_kubernetes_takes() -> None:
    for secret in ("a", "a" * 253, "cert.pool-1." + "b" * 70):
        volumes = launched_pod(1, secret=secret, pool="p")["spec"]["volumes"]
        assert secret in [volume.get("secret", {}).get("secretName") for volume in volumes]


@pytest.mark.parametrize("run_id", ["digits", "-9-", "---", "a" * 64, "x" * 49 + "-y", "0"])
def test_every_run_has_a_name_that_pods_can_have(run_id: str) -> None:
    name = kubernetes_job(launched(1, INSECURE, run_id=run_id), shape())["metadata"]["name"]
    assert name
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", f"{name}-99999-abcde")


@pytest.mark.parametrize(
    ("num_workers", "options", "changed", "problem"),
    [
        (3, (INSECURE,), {"per_pod": 2}, "--per-pod: 3 workers do not fill pods of 2"),
        (3, (INSECURE,), {"per_pod": 0}, "--per-pod: 0 is not 1 to 16"),
        (17, (INSECURE,), {"per_pod": 17}, "--per-pod: 17 is not 1 to 16"),
        (3, (), {}, "--tls-secret: without a certificate nothing is encrypted"),
        (3, (), {"secret": "s"}, "--tls-secret: goes with --pool"),
        (3, (INSECURE,), {"pool": "p"}, "--tls-secret: goes with --pool"),
        (1, (INSECURE,), {"memory": "8GB"}, "--memory: '8GB' is no quantity of bytes"),
        *(
            (1, (INSECURE,), {"node_labels": (label,)}, f"--node-label: '{label}' is not a label")
            for label in ("gpu", "a=b=c", "-a=b")
        ),
        *(
            (1, (INSECURE,), {"namespace": name}, f"--namespace: '{name}' is not 1 to 63 of a-z")
            for name in ("My_Team", "")
        ),
        *(
            (1, (INSECURE,), {"queue": name}, f"--queue: '{name}' is not 1 to 63 of a-z")
            for name in ("Team A", "a" * 64)
        ),
        *(
            (1, (), {"secret": name, "pool": "p"}, f"--tls-secret: '{name}' is not 1 to 253 of a-z")
            for name in ("s/t", "a" * 254, "a..b")
        ),
        (1, (), {"secret": "s", "pool": "p q"}, "--pool: 'p q' is not a pool"),
        (1, (INSECURE,), {"image": "a b"}, "--image: 'a b' is not an image"),
        (1, (INSECURE, "--listen=:1"), {}, "--worker: --listen is set by the launch"),
        (1, ("--pool", "q"), {"secret": "s", "pool": "p"}, "--worker: --pool is set by"),
        *(
            (1, (INSECURE,), {"job_name": name}, f"--job-name: '{name}' is not 1 to 50 of")
            for name in ("A", "a-", "a" * 51)
        ),
    ],
)
def test_what_does_not_fit_is_named(
    num_workers: int, options: tuple[str, ...], changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(problem)):
        kubernetes_job(launched(num_workers, *options), shape(**changed))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("echo no such namespace >&2; exit 1", "kubectl: no such namespace"), (None, "no kubectl")],
)
def test_what_kubectl_refuses_is_said(
    text: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if text is not None:
        (tmp_path / "kubectl").write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "kubectl").chmod(0o755)
    with pytest.raises(UnavailableError, match=problem):
        submit(tmp_path / "job.yaml")


def test_printing_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_text(json.dumps(document()))
    command = ["launch", "kubernetes", "job.json", "-n", "2", "--coordinator", "nowhere:1"]
    command += ["--gpus", "1", "--worker", INSECURE, "--print", "--run-id", "r"]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    (container,) = yaml.safe_load(done.output)["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"stratagem-worker-gpu:{VERSION}"
    assert "stratagem-coordinator:7070" in container["args"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json"]

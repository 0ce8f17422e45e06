"""The pods that `stratagem launch kubernetes` asks for: workers of one run, each a container.

Pure. They are those of `deploy/kubernetes`, but for what a StatefulSet gives: a launched worker has
no name that comes back. They carry a label of their own, so that neither the Service nor the
disruption budget of the standing workers selects them; a budget would refuse all evictions for pods
of a Job.
"""

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from stratagem.client.launch.worker_launch import WorkerLaunch

PORT: Final = 7072
"""Of the first worker of a pod, where the network policies let the coordinator in."""
HEALTH_PORT: Final = 7172
METRICS_PORT: Final = 9100
"""Of the first worker of a pod, where the component `metrics` lets Prometheus in."""
MAX_PER_POD: Final = 16
START_APART_S: Final = 60
"""Workers of one pod may begin to serve so much apart, and a minute more."""
GRACE_S: Final = 60
DRAIN_GRACE_S: Final = 45
MAX_NAME: Final = 50
"""Pods are called as their job, with an index and five letters: at most 63 in all."""
USER: Final = 10001
CODE: Final = "/srv/code"
DATA: Final = "/var/lib/stratagem"
CERTIFICATES: Final = "/etc/stratagem/tls"

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PodShape:
    """What the pods of a launch are like."""

    namespace: str
    image: str
    per_pod: int
    """Workers of one pod, each a container. One pod of a node lets them share its memory."""
    cpus: int
    memory: str
    gpus: int
    """Of each worker."""
    queue: str | None
    """Of Kueue, which starts the job when its turn has come."""
    secret: str | None
    """With ca.crt, pool-POOL.crt and pool-POOL.key."""
    pool: str | None
    metrics: bool
    """Whether each worker serves Prometheus' metrics."""
    node_labels: tuple[str, ...] = ()
    """KEY=VALUE that nodes must have."""
    job_name: str | None = None
    """Of the Job; the run's unless given, as for the second kind of nodes of a run."""


def template(launch: WorkerLaunch, shape: PodShape) -> Object:
    """Return what each pod is made from, with its metadata."""
    return {"metadata": _about(launch, shape), "spec": _pod(launch, shape)}


def said_of(shape: PodShape) -> tuple[str, ...]:
    """Return the names of the options that a pod says of its workers."""
    return tuple(word.partition("=")[0] for word in _options(shape, 0))


def labels_of(launch: WorkerLaunch) -> Object:
    """Return the labels of all pods of a run, and of its Jobs."""
    return {
        "app.kubernetes.io/name": "stratagem",
        "app.kubernetes.io/component": "launched-worker",
        "app.kubernetes.io/instance": name_of(launch.run_id),
    }


def name_of(run_id: str) -> str:
    """Return the name of a run's job: a run's id may be longer, and begin and end otherwise."""
    name = re.sub(r"^[^a-z0-9]+|[^a-z0-9]+$", "", run_id)
    if name == run_id and len(name) <= MAX_NAME:
        return name
    digest = blake2b(run_id.encode(), digest_size=4).hexdigest()
    return f"{name[: MAX_NAME - 9]}-{digest}".lstrip("-")


def _about(launch: WorkerLaunch, shape: PodShape) -> Object:
    """Return the metadata of the pods.

    The annotations by which Prometheus finds pods have room for one port: they are those of the
    standing workers where a pod has one worker, and there are none where some would be missed.
    """
    about: Object = {"labels": labels_of(launch)}
    if shape.metrics and shape.per_pod == 1:
        about["annotations"] = {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(METRICS_PORT),
            "prometheus.io/path": "/metrics",
        }
        if shape.secret is not None:
            about["annotations"]["prometheus.io/scheme"] = "https"
    return about


def _pod(launch: WorkerLaunch, shape: PodShape) -> Object:
    volumes: list[Object] = [{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    # The workers of a pod exchange tensors there; what it takes counts as their memory.
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if shape.secret is not None:
        secret = {"secretName": shape.secret, "defaultMode": 0o440}
        volumes.append({"name": "tls", "secret": secret})
    pod: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(launch, shape, number) for number in range(shape.per_pod)],
        "volumes": volumes,
    }
    if shape.node_labels:
        pod["nodeSelector"] = dict(label.split("=") for label in shape.node_labels)
    if shape.gpus:
        toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        pod["tolerations"] = [toleration]
    return pod


def _container(launch: WorkerLaunch, shape: PodShape, number: int) -> Object:
    words = [*launch.command_of("kubernetes"), *_options(shape, number)]
    ports = {"grpc": PORT, "health": HEALTH_PORT}
    if shape.metrics:
        ports["metrics"] = METRICS_PORT
    limits: Object = {"memory": shape.memory}
    if shape.gpus:
        limits["nvidia.com/gpu"] = shape.gpus
    mounts: list[Object] = [
        {"name": "data", "mountPath": DATA, "subPath": f"worker-{number}"},
        {"name": "tmp", "mountPath": "/tmp", "subPath": f"worker-{number}"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if shape.secret is not None:
        mounts.append({"name": "tls", "mountPath": CERTIFICATES, "readOnly": True})
    own = {"grpc": {"port": HEALTH_PORT + number}}
    alive = own if shape.per_pod == 1 else _all_alive(shape.per_pod)
    return {
        "name": f"worker-{number}",
        "image": shape.image,
        "command": words[:3],
        "args": words[3:],
        "env": _environment(f"worker-{number}", shape),
        "ports": [
            {"name": f"{name}-{number}", "containerPort": first + number}
            for name, first in ports.items()
        ],
        "startupProbe": {**own, "periodSeconds": 2, "failureThreshold": 150},
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "resources": {
            "requests": {"cpu": str(shape.cpus), "memory": shape.memory},
            "limits": limits,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _options(shape: PodShape, number: int) -> list[str]:
    """Return the options of a worker that follow from its pod."""
    words = [
        f"--name=$(POD_NAME)-{number}" if number else "--name=$(POD_NAME)",
        f"--listen=$(POD_IP):{PORT + number}",
        f"--health-port={HEALTH_PORT + number}",
        f"--data-dir={DATA}",
        f"--drain-grace-s={DRAIN_GRACE_S}",
        "--log-json",
    ]
    if shape.metrics:
        words.append(f"--metrics-port={METRICS_PORT + number}")
    if shape.secret is not None:
        words += [
            f"--tls-ca={CERTIFICATES}/ca.crt",
            f"--tls-cert={CERTIFICATES}/pool-{shape.pool}.crt",
            f"--tls-key={CERTIFICATES}/pool-{shape.pool}.key",
            f"--pool={shape.pool}",
        ]
    return words


def _all_alive(num_workers: int) -> Object:
    """Return a probe that asks all workers of a pod.

    A pod ends when all of its containers have ended, and only then is it made again. The place of a
    worker that has died would stay empty for as long as the others live: so they leave, too. The
    delay is for those that start later than others.
    """
    addresses = [f"$POD_IP:{HEALTH_PORT + number}" for number in range(num_workers)]
    command = ["python", "-m", "stratagem.common.health", *addresses]
    return {"exec": {"command": command}, "initialDelaySeconds": START_APART_S}


def _environment(container: str, shape: PodShape) -> list[Object]:
    """Return what the pod is told of itself, with the threads that are paid for: the number of a
    node's cores is not the same everywhere, and threads are part of the numerics."""
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    if shape.metrics:  # as for the standing workers, whose deployment is their namespace
        fields["STRATAGEM_WORKER_METRICS_DEPLOYMENT"] = "metadata.namespace"
    told: list[Object] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    cpus = {"containerName": container, "resource": "requests.cpu", "divisor": "1"}
    for name in ("STRATAGEM_WORKER_THREADS", "STRATAGEM_WORKER_MAX_READERS"):
        told.append({"name": name, "valueFrom": {"resourceFieldRef": cpus}})
    return told
